"""The table byte for byte, and the check of tables: others' measured tables pass, and a changed digit fails."""

import math
import random
import re
from pathlib import Path

import pytest

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.bench_serving.metrics import RequestResult, Spread, figures
from ling3export.runners.bench_serving.table import DURATION, LATENCY, NEEDED, RATES, TOTAL, check, parse, render

TABLES = sorted((Path(__file__).parents[2] / "data" / "serving_tables").glob("*.txt"))
GOLDEN = """
============ Serving Benchmark Result ============
Backend:                                 ling3     
Traffic request rate:                    inf       
Max request concurrency:                 not set   
Successful requests:                     3         
Benchmark duration (s):                  0.50      
Total input tokens:                      12        
Total generated tokens:                  8         
Total generated tokens (retokenized):    7         
Request throughput (req/s):              6.00      
Input token throughput (tok/s):          24.00     
Output token throughput (tok/s):         16.00     
Total token throughput (tok/s):          40.00     
Concurrency:                             1.00      
----------------End-to-End Latency----------------
Mean E2E Latency (ms):                   166.67    
Median E2E Latency (ms):                 150.00    
---------------Time to First Token----------------
Mean TTFT (ms):                          116.67    
Median TTFT (ms):                        100.00    
P99 TTFT (ms):                           198.00    
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          29.17     
Median TPOT (ms):                        29.17     
P99 TPOT (ms):                           33.25     
---------------Inter-Token Latency----------------
Mean ITL (ms):                           30.00     
Median ITL (ms):                         30.00     
P99 ITL (ms):                            49.60     
=================================================="""  # noqa: W291


def worked():
    rows = [([0.10, 0.12, 0.15], 3), ([0.20], 1), ([0.05, 0.10, 0.11, 0.15], 3)]
    return [RequestResult(0.0, times, 4, len(times), retokenized=again) for times, again in rows]


def shown(found, **more):
    return render(found, **({"backend": "ling3", "rate": math.inf, "limit": None} | more))


def test_the_table_is_golden():
    assert shown(figures(worked(), 0.5)) == GOLDEN
    assert {len(line) for line in GOLDEN.splitlines()[1:]} <= {50, 51}


def test_more_rows_follow_the_table_and_change_none_of_it():
    found = figures(worked(), 0.5)
    lines = shown(found, extended=True).splitlines()
    assert lines[: len(GOLDEN.splitlines()) - 1] == GOLDEN.splitlines()[:-1]
    assert "P95 ITL (ms):                            48.00     " in lines
    assert "Cache hit rate (%):                      not known " in lines


def test_our_own_table_agrees():
    assert check(GOLDEN) == []
    assert parse(GOLDEN)["Max request concurrency"] == "not set"


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_tables_measured_elsewhere_agree(path):
    assert len(TABLES) == 5
    assert check(path.read_text()) == []


def possible(rows):
    """Whether some duration, rounded, gives every printed rate; tried on a fine grid, independently of the check."""
    value = {name: float(rows[name]) for name in NEEDED}
    counts = [(value[counted], value[rate]) for counted, rate in RATES]
    counts.append((counts[1][0] + counts[2][0], value[TOTAL]))
    busy = [value["Successful requests"] * (value[LATENCY] + sign * 0.005) / 1e3 for sign in (-1, 1)]
    for step in range(-5000, 5001):
        duration = value[DURATION] + step * 1e-6
        near = all(abs(count / duration - rate) <= 0.005 + 1e-9 * rate for count, rate in counts)
        if near and busy[0] / duration - 0.005 <= value["Concurrency"] <= busy[1] / duration + 0.005:
            return True
    return False


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_changed_digit_is_found_unless_rounding_explains_it(path):
    """Replaces each digit of every row on which others depend, one at a time."""
    text, rng = path.read_text(), random.Random(path.stem)
    found = hidden = 0
    for name in NEEDED:
        (row,) = re.finditer(rf"^{re.escape(name)}: (.*)$", text, re.MULTILINE)
        for digit in re.finditer(r"\d", row[1]):
            at = row.start(1) + digit.start()
            changed = text[:at] + rng.choice([each for each in "0123456789" if each != digit[0]]) + text[at + 1 :]
            if check(changed):
                found += 1
            else:
                assert possible(parse(changed)), (name, row[1], changed[row.start(1) : row.end(1)])
                hidden += 1
    assert found > 5 * hidden


def test_a_median_above_its_99th_percentile_is_found():
    text = TABLES[2].read_text().replace("P99 TTFT (ms): 8834.48", "P99 TTFT (ms): 1834.48")
    assert check(text) == ["`Median TTFT (ms)` 8393.70: expected at most `P99 TTFT (ms)`, found 1834.48"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "table: no line with Serving Benchmark Result"),
        (GOLDEN.replace("6.00 ", "nan  "), r"row `Request throughput \(req/s\)`, found nan"),
        (GOLDEN.replace("Concurrency: ", "Concurrent: "), "row `Concurrency`, found nothing"),
    ],
)
def test_an_invalid_table_is_refused(text, message):
    with pytest.raises(Ling3Error, match=message):
        check(text)


def test_without_an_answer_every_figure_is_zero_and_none_is_nan():
    found = figures([RequestResult(0.0, error="refused")], 0.0)
    assert (found.completed, found.failed) == (0, 1)
    assert {found.e2e, found.ttft, found.tpot, found.itl} == {Spread()}
    assert found.request_throughput == found.concurrency == 0


def test_a_failed_request_counts_as_failed_alone():
    failed = RequestResult(0.0, [9.0, 18.0], 100, 2, error="cut short")
    found, without = figures([*worked(), failed], 0.5), figures(worked(), 0.5)
    assert (found.failed, found.e2e, found.input_tokens) == (1, without.e2e, without.input_tokens)
