#!/bin/sh
# A batch on 64 machines that know nothing of each other, as a Slurm array: sbatch slurm-shards.sh ARTIFACT INPUT FOLDER.
# A task that was ended is requeued and goes on where it was. Then, on one machine:
# cat $(ls -v FOLDER/part-*.jsonl) > FOLDER/answers.jsonl
#SBATCH --job-name=ling3
#SBATCH --array=0-63
#SBATCH --nodes=1
#SBATCH --requeue
set -eu
exec ling3-runner batch "$1" "$2" "$3/part-$SLURM_ARRAY_TASK_ID.jsonl" --shard auto
