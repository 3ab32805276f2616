"""``ling3export plan --fleet``: what a number of chips passes, and how they are best divided."""

import json
import re

import pytest
from click.testing import CliRunner

from ling3export.checkpoint.synth import config_fields
from ling3export.cli import main as cli
from ling3export.foundation.errors import PlanError
from ling3export.simulation.divide import RequestKind, read_kinds, requests

SMALL = ("--target", "tpu:v6e:2x2", "--max-running", 4, "--paddings", "16,128", "--decode-paddings", "1,4")
ONE = '{"prompt_tokens": 30, "output_tokens": 2}'  # a line of requests


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_fields("full", {})))
    return path


def called(config, lines, *options):
    (config.parent / "asked.jsonl").write_text("\n".join(lines))
    words = ["plan", config, "--fleet", config.parent / "asked.jsonl", *options]
    return CliRunner().invoke(cli.main, list(map(str, words)))


def test_a_fleet_is_divided_for_its_requests(config):
    lines = ['{"prompt_tokens": 300, "output_tokens": 20, "count": 3}', '{"prompt_tokens": 40, "output_tokens": 60}']
    done = called(config, lines, *SMALL, "--chips", 35)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    text = done.stdout.splitlines()
    assert text[0] == (
        "fleet  8 replicas of 4 chips; on average 235 tokens in, 30 out; times are roofline bounds, which no program "
        "reaches"
    )
    assert [line.split()[0] for line in text if re.match(r"  \S+ +[\d,]+( +[\d.,]+){4}$", line)] == [
        "8",
        *(f"{n}P{8 - n}D" for n in range(1, 8)),
    ]
    assert text[-2] == f"  best: {text[-2].split()[1]} {text[-2].split()[2]} requests/s"
    found = json.loads(called(config, lines, *SMALL, "--chips", 35, "--json").stdout)
    assert found["replicas"] == 8 and found["chips"] == 4 and (found["times"], found["note"]) == ("bounds", None)
    assert list(found["paddings"]) == ["16,1", "16,4", "128,1", "128,4"]
    assert found["paddings"]["128,4"] == max(found["paddings"].values()) > 2 * found["paddings"]["16,1"]
    rates = [division["requests_per_second"] for division in found["divisions"]]
    assert found["best"]["requests_per_second"] >= 0.98 * max(rates)
    # One side is the limit at both ends.
    assert rates[1] < max(rates[1:]) > rates[-1]


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ('{"prompt_tokens": 30}', ("--chips", 4), "--fleet: expected the field output_tokens, found none, in line 1"),
        (
            f'{ONE[:-1]}, "prefix_tokens": 30}}',
            ("--chips", 4),
            "--fleet: expected prefix_tokens below prompt_tokens, found 30 and 30",
        ),
        (
            ONE.replace("30", "9000"),
            ("--chips", 4),
            "--fleet: expected requests within the context of 8192, found 9000 and 2 tokens",
        ),
        (ONE, ("--chips", 3), "--chips: expected at least the 4 of tpu:v6e:2x2, found 3"),
        (ONE, ("--chips", 4, "--target", "cpu"), "--fleet: expected one --target, found 2"),
    ],
)
def test_what_cannot_be_simulated_is_refused(config, line, options, message):
    done = called(config, [line], *SMALL, *options)
    assert done.exit_code == 1
    assert message in done.stderr


def test_a_processor_whose_times_nobody_knows_is_refused(config):
    done = called(config, [ONE], "--chips", 16)
    assert "--fleet: expected a target whose times are known, found `cpu`" in done.stderr
    assert called(config, ["{}"], "--target", "cpu").exit_code == 2


def test_requests_are_drawn_as_often_as_the_file_says(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(
        '{"prompt_tokens": 30, "output_tokens": 2, "count": 3}\n'
        '{"prompt_tokens": 40, "output_tokens": 5, "prefix_tokens": 32, "prefixes": 2}\n'
    )
    kinds = read_kinds(path)
    assert kinds == [RequestKind(30, 2, 3), RequestKind(40, 5, 1, 32, 2)]
    drawn = [*requests(kinds, 4000, rate=10.0)]
    assert sum(each.prompt == 30 for each in drawn) == pytest.approx(3000, rel=0.05)
    assert {each.prefix for each in drawn if each.prompt == 30} == {-1}
    assert len({each.prefix for each in drawn if each.prompt == 40}) == 2
    assert drawn[-1].at == pytest.approx(400, rel=0.1)
    assert [each.at for each in drawn] == sorted(each.at for each in drawn)
    with pytest.raises(PlanError, match="expected a readable file"):
        read_kinds(tmp_path / "no.jsonl")
