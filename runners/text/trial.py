"""Tries a grammar in a process of its own, which can be ended: a few bytes of one can take hours and gigabytes.

The grammar of ``{"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}`` has 10^8 states,
which are all made before the first token. A compiled grammar cannot go from one process to another, so this process
compiles it again once the other has shown it to be cheap.
"""

import resource
import signal
import threading
import weakref
from collections.abc import Callable, Iterable

from ling3export.foundation.errors import Ling3Error, RequestError
from ling3export.foundation.processes import Child, Parent, ending
from ling3export.runners.text.grammar import Grammar, Grammars
from ling3export.runners.text.vocabulary import Tokenizer

SECONDS = 3.0  # of processor time that a grammar may take, its first masks among them; large ones take 0.1
BYTES = 64 << 20  # of memory that it may take
PROCESSES = 3  # that try grammars at once
TURN = 5.0  # seconds to wait until one is free
WAIT = 30.0  # seconds until a try is given up on a machine that is busy
TOKENS = 3  # that are taken: some grammars fail after any first token


class GrammarBusy(Ling3Error):
    """Too many grammars are being tried, and none of the trials has ended in time."""


class GrammarTrial:
    """At most PROCESSES processes that try grammars for one tokenizer. Each starts when it is needed first.

    Attributes:
        turns: One for each process; held while it tries a grammar.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos: Iterable[int]) -> None:
        self._vocabulary = {"tokenizer": tokenizer, "vocab_size": vocab_size, "eos": sorted(eos)}
        self.turns = threading.BoundedSemaphore(PROCESSES)
        self._idle: list[tuple[Child, Callable[[], object]]] = []  # each process, with what closes it

    def refusal(self, grammar: Grammar) -> str:
        """The fault of a grammar; empty where it has none.

        Raises:
            GrammarBusy: No process was free for TURN seconds.
            RequestError: It took more than WAIT seconds, which the machine may be to blame for.
        """
        if not self.turns.acquire(timeout=TURN):
            raise GrammarBusy(f"grammars: {PROCESSES} others are being compiled and took over {TURN:g} s", "try again")
        try:
            child, close = self._idle.pop() if self._idle else self._started()
            overdue = threading.Timer(WAIT, child.kill)
            overdue.daemon = True
            overdue.start()
            child.send(grammar._asdict())
            reply = child.receive()
            overdue.cancel()
            if reply is not None:
                self._idle.append((child, close))
                return str(reply["refusal"])
            code, _ = child.ended()
            close()
        finally:
            self.turns.release()
        wanted = f"expected a {grammar.kind} grammar that takes at most {SECONDS:g} s and {BYTES >> 20} MiB to compile"
        if code == -signal.SIGKILL:
            raise RequestError(f"{wanted}, found one that was not compiled within {WAIT:g} s")
        bounds = {-signal.SIGPROF: "more time", -signal.SIGABRT: "more memory"}
        return (
            f"{wanted}, found one that takes {bounds[code]}" if code in bounds else f"{wanted}, found it {ending(code)}"
        )

    def _started(self) -> tuple[Child, Callable[[], object]]:
        child = Child(__spec__.name)
        close = weakref.finalize(self, child.__exit__)
        child.send(self._vocabulary)
        return child, close


def main() -> None:
    """The other process: bounded by the system, since nothing else ends llguidance."""
    parent = Parent()
    told = parent.receive()
    grammars = Grammars(Tokenizer(told["tokenizer"].encode()), told["vocab_size"], told["eos"])
    grammars.follow(Grammar("regex", "[a-z]+"), TOKENS)  # loads what is loaded once, before there is a bound
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    while True:
        grammar = Grammar(**parent.receive())
        with open("/proc/self/statm") as file:
            held = int(file.read().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (held + BYTES, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            grammars.follow(grammar, TOKENS)
            refusal = ""
        except RequestError as error:
            refusal = error.message
        signal.setitimer(signal.ITIMER_PROF, 0)
        parent.send({"refusal": refusal})


if __name__ == "__main__":
    main()
