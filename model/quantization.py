"""``quantization_config`` of config.json: which of the two published quantizations it names, and for which modules.

It decides nothing: the tensors say by themselves how they are stored (ling3export/checkpoint/forms.py), and are
compared with it. A field that changes the meaning of a stored number is refused by name.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ling3export.foundation.errors import shown
from ling3export.model.fields import only, refused

HINT = "the bf16 checkpoint is read, and the official FP8 (fp8) and INT4 (compressed-tensors) ones"

# The value of a field that is there; the tensors' names, dtypes and shapes agree with it.
_FP8 = {
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
    "expert_dtype": "fp8",
}
_INT4 = {"format": "pack-quantized", "quantization_status": "compressed"}
_GROUP = {"format": "pack-quantized"}
_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
# How the numbers were found, and who wrote them: without effect on what they mean.
_IGNORED = frozenset("quant_method version global_compression_ratio observer observer_kwargs dequantize".split())

MOST_PATTERNS = 64
LONGEST_PATTERN = 256
# So a match takes few steps: little to repeat, nothing repeated within a repeated group, few alternatives.
MOST_REPEATS, MOST_BRANCHES = 3, 8
MOST_SECONDS = 10.0  # of processor time for all patterns of a list against all names; published lists take milliseconds
_OPAQUE = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^]\\])*\]|\(\?:", re.DOTALL
)  # an escape, a class, the start of a plain group
_REPEATED_GROUP = re.compile(r"\)[*+?{]|\(\?")  # or a group with a meaning of its own


class Names:
    """Modules by name: by the end of it from a dot on, or by a regular expression (``re:…``) at its start.

    ``b_proj`` names ``attention.b_proj`` and not ``attention.q_b_proj``. ``at`` and ``where`` name the field and the
    file in messages.
    """

    def __init__(self, entries: Sequence[str], at: str, where: str) -> None:
        self._ends = {entry for entry in entries if not entry.startswith("re:")}
        self._patterns = [re.compile(entry[3:]) for entry in entries if entry.startswith("re:")]
        self._at, self._where, self._spent = at, where, 0.0

    def __contains__(self, module: str) -> bool:
        parts = module.split(".")
        ends = (".".join(parts[start:]) for start in range(len(parts)))
        return any(end in self._ends for end in ends) or any(
            self._matches(pattern, module) for pattern in self._patterns
        )

    def _matches(self, pattern: re.Pattern[str], module: str) -> bool:
        if self._spent > MOST_SECONDS:
            expected = f"regular expressions that take at most {MOST_SECONDS:g} s for all names"
            raise refused(self._at, expected, f"longer ones, such as {shown(pattern.pattern)}", self._where)
        start = time.thread_time()
        match = pattern.match(module)
        self._spent += time.thread_time() - start
        return match is not None


@dataclass(frozen=True)
class Quantization:
    """The content of ``quantization_config``."""

    form: str  # ``fp8`` or ``int4``
    targets: Names | None  # the modules that are quantized; None for every linear one
    exclusions: Names  # modules of ``targets`` that are not

    def covers(self, module: str) -> bool:
        """Whether a linear module is quantized; ``module`` is its whole name, without ``.weight``.

        Raises:
            ConfigError: The regular expressions have taken MOST_SECONDS.
        """
        return (self.targets is None or module in self.targets) and module not in self.exclusions


def quantization(config: dict[str, Any], where: str) -> Quantization | None:
    """The quantization of a config; None where it names none.

    Raises:
        ConfigError: It is neither of the published two; the message names the field.
    """
    if config.get("quantization") is not None:  # MLX's own
        raise refused("quantization", "no such field", shown(config["quantization"]), where, HINT)
    at = "quantization_config"
    if config.get(at) is None:
        return None
    data = _object(config[at], at, where)
    method = data.get("quant_method")
    if method == "fp8":
        _check(data, _FP8, {"modules_to_not_convert"}, at, where)
        return Quantization("fp8", None, _names(data, "modules_to_not_convert", at, where))
    if method != "compressed-tensors":
        raise refused(f"{at}.quant_method", "fp8 or compressed-tensors", shown(method), where, HINT)
    _check(data, _INT4, {"config_groups", "ignore"}, at, where)
    groups = _object(data.get("config_groups"), f"{at}.config_groups", where)
    if len(groups) != 1:
        raise refused(f"{at}.config_groups", "one group", shown(groups), where, HINT)
    name, group = next(iter(groups.items()))
    within = f"{at}.config_groups.{name}"
    group = _object(group, within, where)
    _check(group, _GROUP, {"weights", "targets"}, within, where)
    _check(_object(group.get("weights"), f"{within}.weights", where), _WEIGHTS, set(), f"{within}.weights", where)
    targets = _names(group, "targets", within, where)
    every = "Linear" in group["targets"] if group.get("targets") else True
    return Quantization("int4", None if every else targets, _names(data, "ignore", at, where))


def _object(value: Any, at: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refused(at, "an object", shown(value), where, HINT)
    return value


def _check(data: dict[str, Any], allowed: dict[str, Any], read: set[str], at: str, where: str) -> None:
    """Passes where each field has its one allowed value, is ``read`` by others, without effect, or empty."""
    for name, value in data.items():
        if name in allowed and value is not None:
            if not (rule := only(allowed[name])).accepts(value):
                raise refused(f"{at}.{name}", rule.expected, shown(value), where, HINT)
        elif name not in read | _IGNORED and value not in (None, False, {}, []):
            raise refused(f"{at}.{name}", "no such field", shown(value), where, HINT)


def _names(data: dict[str, Any], name: str, at: str, where: str) -> Names:
    entries = data.get(name) or []
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise refused(f"{at}.{name}", "a list of modules' names", shown(entries), where)
    patterns = [entry[3:] for entry in entries if entry.startswith("re:")]
    if len(patterns) > MOST_PATTERNS:
        raise refused(f"{at}.{name}", f"at most {MOST_PATTERNS} regular expressions", str(len(patterns)), where)
    for pattern in patterns:
        if not _is_bounded(pattern):
            expected = f"simple regular expressions (at most {MOST_REPEATS} repeats, none of a group)"
            raise refused(f"{at}.{name}", expected, shown(pattern), where)
    return Names(entries, f"{at}.{name}", where)


def _is_bounded(pattern: str) -> bool:
    """Whether a regular expression is one, and matching a name is little work."""
    if len(pattern) > LONGEST_PATTERN:
        return False
    plain = _OPAQUE.sub(lambda part: "(" if part[0] == "(?:" else "x", pattern)
    plain = plain.removesuffix("$").removesuffix(".*")  # the end of a name takes no search
    if sum(map(plain.count, "*+?{")) > MOST_REPEATS or plain.count("|") > MOST_BRANCHES:
        return False
    if _REPEATED_GROUP.search(plain):
        return False
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return True
