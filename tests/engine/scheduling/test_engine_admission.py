import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_examples import random_examples
from tiny_pools import check, tiny_pools

from espalier.engine.errors import PoolTooSmallError
from espalier.engine.scheduling.admission import Admission, Reservation


def test_what_can_never_fit_is_refused_with_the_numbers():
    pools = tiny_pools(slabs=4)
    admission = Admission(pools["generator"].kv_pool, pools)
    with pytest.raises(PoolTooSmallError) as caught:
        admission.try_reserve({"generator": 7, "verifier": 3})  # 3 + 2 slabs
    assert (caught.value.needed_bytes, caught.value.pool_bytes) == (5 * 768, 4 * 768)
    assert "--kv-memory" in str(caught.value)
    assert admission.reserved_blocks == {"generator": 0, "verifier": 0}


def test_what_fits_alone_but_not_now_waits_until_room_is_handed_back():
    pools = tiny_pools(slabs=4)
    admission = Admission(pools["generator"].kv_pool, pools)
    first = admission.try_reserve({"generator": 6, "verifier": 2})
    assert first is not None
    assert admission.try_reserve({"generator": 3, "verifier": 2}) is None
    assert admission.reserved_blocks == {"generator": 6, "verifier": 2}
    admission.release(first)
    assert admission.try_reserve({"generator": 3, "verifier": 2}) is not None


def test_reservations_of_one_role_share_a_slab():
    pools = tiny_pools(slabs=2)
    admission = Admission(pools["generator"].kv_pool, pools)
    assert all(admission.try_reserve({"generator": 2}) is not None for _ in range(3))
    assert admission.try_reserve({"generator": 1}) is None


def test_a_reservation_cannot_be_handed_back_twice():
    pools = tiny_pools()
    admission = Admission(pools["generator"].kv_pool, pools)
    reservation = admission.try_reserve({"generator": 2})
    assert reservation is not None
    admission.release(reservation)
    with pytest.raises(AssertionError, match="twice"):
        admission.release(reservation)


def test_slabs_held_by_scattered_blocks_count_in_full():
    pools = tiny_pools(slabs=3)
    admission, generator = Admission(pools["generator"].kv_pool, pools), pools["generator"]
    stays, ends = (admission.try_reserve({"generator": 3}) for _ in range(2))
    assert stays is not None
    assert ends is not None
    kept = [generator.allocate()]
    passing = [generator.allocate(), generator.allocate()]
    kept.append(generator.allocate())  # in a second slab
    generator.free(passing)
    admission.release(ends)
    # what is reserved would fit one slab, but its two blocks lie in two
    assert admission.try_reserve({"verifier": 4}) is None
    assert admission.try_reserve({"verifier": 2}) is not None
    generator.free(kept)


@random_examples(150)
@given(st.data())
def test_what_is_reserved_can_always_be_allocated_however_fragmented_the_slabs(data: st.DataObject):
    """Searches come and go, each using any part of its reservation; none may ever meet an empty pool."""
    pools = tiny_pools(slabs=6)
    admission = Admission(pools["generator"].kv_pool, pools)
    running: list[tuple[Reservation, dict[str, list[int]]]] = []
    for _ in range(30):
        action = data.draw(st.sampled_from(["reserve", "allocate", "free", "end"]))
        if action == "reserve":
            blocks = {"generator": data.draw(st.integers(0, 8)), "verifier": data.draw(st.integers(0, 5))}
            if sum(pools[role].slabs_for(n) for role, n in blocks.items()) <= 6:
                reservation = admission.try_reserve(blocks)
                if reservation is not None:
                    running.append((reservation, {"generator": [], "verifier": []}))
        elif running:
            index = data.draw(st.integers(0, len(running) - 1))
            reservation, held = running[index]
            role = data.draw(st.sampled_from(["generator", "verifier"]))
            if action == "allocate":
                wanted = data.draw(st.integers(0, reservation.blocks[role] - len(held[role])))
                held[role] += [pools[role].allocate() for _ in range(wanted)]  # never raises
            elif action == "free" and held[role]:
                pools[role].free([held[role].pop(data.draw(st.integers(0, len(held[role]) - 1)))])
            elif action == "end":
                for of_role, blocks_held in held.items():
                    pools[of_role].free(blocks_held)
                admission.release(reservation)
                del running[index]
        check(pools, {role: [np.array(h[role], dtype=int) for _, h in running] for role in pools})
