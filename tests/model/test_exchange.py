"""copy, fetch and store move a sequence's state bit for bit, in every TP and form."""

from pathlib import Path

import jax
import numpy as np
import pytest

from tests.support.direct import pack
from tests.support.numerics import Case, Quick

pytestmark = pytest.mark.jit

PAGE, PAGES = 4, 4


class Mover(Quick):
    """Calls of copy, fetch and store."""

    def move(self, phase: str, padding: int, given=None, **fields):
        step, call = self.step(phase, padding)
        batch = {"packed": pack(step.fields, **fields)}
        if given is not None:
            batch |= self._put(given, {name: spec for name, spec in step.specs[2].items() if name != "packed"})
        after, out = call({}, {name: self.state[name] for name in step.arguments[1]}, batch)
        self.state = self.state | after
        return {name: np.asarray(value) for name, value in out.items()}

    def place_of(self, page: int) -> int:
        """Index of a page in the pool's array. In a striped pool, each device has its own pages, after a dummy page."""
        if not self.geometry.striped:
            return page
        tp, each = self.geometry.tp, self.geometry.pages // self.geometry.tp + 1
        return (page - 1) % tp * each + (page - 1) // tp + 1

    def listed(self, slot: int) -> np.ndarray:
        """A slot's pages in the order of a call: in a striped pool, those of the first device come first."""
        pages, tp = self.tables[slot][:PAGES], self.geometry.tp
        if not self.geometry.striped:
            return pages
        return np.concatenate([pages[(pages - 1) % tp == device] for device in range(tp)])

    def fetch(self, slot: int):
        """The state of a slot, with latents in the order of their positions."""
        out, listed = self.move("offload", PAGES, slot=[slot], page=self.listed(slot)), list(self.listed(slot))
        order = [listed.index(page) for page in self.tables[slot][:PAGES]]
        return out | {"mla_latent": out["mla_latent"][:, order]}

    def store(self, slot: int, given) -> None:
        places = list(self.tables[slot][:PAGES])
        order = [places.index(page) for page in self.listed(slot)]
        given = given | {"mla_latent": given["mla_latent"][:, order]}
        self.move("onload", PAGES, given, slot=[slot], page=self.listed(slot))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(Path(tmp_path_factory.mktemp("exchange")) / "micro", [1])


def mover(case: Case, tp: int, form: str) -> Mover:
    return Mover(case.config, case.read, tp=tp, form=form, slots=4, page_size=PAGE, max_pages=8)


def marked(machine: Mover, seed: int) -> dict[str, np.ndarray]:
    """An artificial state with a different number in every place."""
    rng, values = np.random.default_rng(seed), dict(machine.step("onload", PAGES)[0].arguments[2])
    del values["packed"]
    return {name: rng.standard_normal(value.shape).astype(value.dtype) for name, value in values.items()}


@pytest.mark.parametrize(("source", "target"), [((4, "tiles"), (1, "loops")), ((2, "loops"), (4, "tiles"))])
def test_a_stored_state_is_fetched_bit_for_bit_in_any_tp_and_form(case, source, target):
    one, other = mover(case, *source), mover(case, *target)
    given = marked(one, 1)
    one.store(2, given)
    # At every TP, the pools have the heads of all devices in the order of the given arrays.
    for name in ("kda_recurrent", "kda_conv"):
        assert np.asarray(one.state[name])[:, 2].tobytes() == given[name].tobytes(), name
    pages = np.asarray(one.state["mla_latent"])
    for at, page in enumerate(one.tables[2][:PAGES]):
        place = one.place_of(page)
        assert pages[:, place].tobytes() == given["mla_latent"][:, at].tobytes()
    other.store(3, one.fetch(2))
    arrived = other.fetch(3)
    for name, value in given.items():
        assert value.tobytes() == arrived[name].tobytes(), name


def test_copies_are_made_in_order_and_touch_nothing_else(case):
    machine = mover(case, 2, "loops")
    marks = {slot: marked(machine, slot) for slot in (1, 2, 3)}
    for slot, given in marks.items():
        machine.store(slot, given)
    before = jax.tree.map(np.asarray, machine.state)
    machine.move("copy", 4, source=[1, 4, 0, 0], target=[4, 2, 0, 0])
    for slot, expected in {1: 1, 2: 1, 3: 3, 4: 1}.items():
        found = machine.fetch(slot)
        for name in ("kda_recurrent", "kda_conv"):
            assert found[name].tobytes() == marks[expected][name].tobytes(), (slot, name)
    machine.move("copy", 4, source=[3, 0, 0, 0], target=[2, 0, 0, 0])
    after = jax.tree.map(np.asarray, machine.state)
    assert (after["mla_latent"] == before["mla_latent"]).all()
    for name in ("kda_recurrent", "kda_conv"):
        assert (after[name][:, 0] == before[name][:, 0]).all(), "padding moves nothing"


def test_no_page_is_fetched_and_stored_for_number_0(case):
    machine = mover(case, 2, "tiles")
    machine.store(1, marked(machine, 1))
    before = jax.tree.map(np.asarray, machine.state)
    page = [machine.listed(1)[0], 0, 0, 0]
    out = machine.move("offload", PAGES, slot=[1], page=page)
    assert out["mla_latent"][:, 0].any() and not out["mla_latent"][:, 1:].any()
    machine.move("onload", PAGES, out, slot=[1], page=page)
    after = jax.tree.map(np.asarray, machine.state)
    for name, value in before.items():
        assert value.tobytes() == after[name].tobytes(), name
