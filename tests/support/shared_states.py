"""One of two hosts that export and import states: ``shared_states.py ARTIFACT FOLDER``.

Host 0 reads JSON lines from stdin and answers each. A line is ``{"complete": REQUEST}``; a REQUEST has the fields of
``engine.request.Request``.
"""

import json
import sys
from pathlib import Path

from ling3export.runners.cli.hosts import keep_stdout
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.follower import follow
from ling3export.runners.engine.request import request_of
from ling3export.runners.hosts.hosts import find_hosts
from ling3export.runners.transfer.options import Transfer


def main() -> None:
    artifact, folder = map(Path, sys.argv[1:])
    hosts, how = (find_hosts(), {"check": "programs"})
    assert hosts is not None
    keep_stdout()
    if hosts.number:
        return follow(artifact, hosts, **how)
    exchanged = Transfer("file", folder=folder / "states", deadline=60.0)
    with Engine(artifact, hosts=hosts, transfer=exchanged, **how) as engine:
        print("ready", flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            (done,) = engine.complete([request_of(asked["complete"])])
            said = {name: getattr(done, name) for name in ("token_ids", "cached_tokens", "kv_transfer_params")}
            print(json.dumps(said | {"free": engine.stats()["free"]}), flush=True)


if __name__ == "__main__":
    main()
