"""The slot memory of TDA, DMN and OGA: what it keeps, and writing to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moontide.methods._slots import NONE, choose_slots, write

torch = pytest.importorskip("torch")

CLASSES, CAPACITY = 3, 2
SAMPLES = st.lists(st.tuples(st.integers(0, CLASSES - 1), st.floats(0, 1), st.booleans()), min_size=1, max_size=30)


@given(SAMPLES)
def test_a_class_keeps_its_lowest_entropies(drawn: list[tuple[int, float, bool]]) -> None:
    labels, h, admitted = (np.asarray(column) for column in zip(*drawn, strict=True))
    memory = np.full((CLASSES, CAPACITY), np.inf)
    slots = choose_slots(memory, labels, h, admitted)
    write(memory, h, labels, slots)
    for k in range(CLASSES):
        kept = np.sort(h[(labels == k) & admitted])[:CAPACITY]
        assert np.array_equal(np.sort(memory[k][np.isfinite(memory[k])]), kept)
        assert np.isfinite(memory[k]).tolist() == sorted(np.isfinite(memory[k]), reverse=True)  # filled from the first


@given(SAMPLES, st.integers(0, 30))
def test_a_batch_in_two_parts_is_the_batch(drawn: list[tuple[int, float, bool]], cut: int) -> None:
    labels, h = (np.asarray(column) for column in list(zip(*drawn, strict=True))[:2])
    whole = choose_slots(np.full((CLASSES, CAPACITY), np.inf), labels, h)
    memory = np.full((CLASSES, CAPACITY), np.inf)
    first = choose_slots(memory, labels[:cut], h[:cut])
    write(memory, h[:cut], labels[:cut], first)
    assert np.array_equal(np.concatenate([first, choose_slots(memory, labels[cut:], h[cut:])]), whole)


def test_a_sample_that_is_not_lower_stays_out() -> None:
    entropy = np.asarray([[0.5, 0.25]])
    assert choose_slots(entropy, np.asarray([0, 0]), np.asarray([0.5, 0.49])).tolist() == [NONE, 0]
    assert entropy.tolist() == [[0.5, 0.25]]  # deciding changes nothing


@pytest.mark.parametrize("convert", [np.asarray, torch.asarray])
def test_the_later_of_two_in_one_slot_stays(convert: type) -> None:
    memory = convert(np.zeros((2, 1, 2), dtype=np.float16))
    write(memory, convert(np.arange(6.0).reshape(3, 2)), np.asarray([1, 1, 0]), np.asarray([0, 0, NONE]))
    assert memory.tolist() == [[[0, 0]], [[2, 3]]]
