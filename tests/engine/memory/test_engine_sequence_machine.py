"""Pools and sequence tables under random use, against a model made of dictionaries.

The model keeps, for every block, the tokens written to it. If two sequences ever wrote to one block, or a copy were
missed or taken from the wrong block, some sequence would no longer read its own tokens back.
"""

import itertools

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tiny_pools import BLOCK_SIZE, check, tiny_pools

from espalier.engine.errors import PoolExhaustedError
from espalier.engine.memory.blocks import BlockPool
from espalier.engine.memory.sequences import KVSequence, SequenceTable

ROLES = st.sampled_from(["generator", "verifier"])


class SequenceMachine(RuleBasedStateMachine):
    window: int | None = None  # of a second KV group of the generator, if it has one
    states = False  # whether the generator has recurrent states

    def __init__(self) -> None:
        super().__init__()
        self.pools = tiny_pools(8, self.window, self.states)
        self.tables = {
            role: SequenceTable(
                [pool for pool in self.pools.values() if pool.role == role], 2, 5, cache_seed=role.encode()
            )
            for role in ("generator", "verifier")
        }
        self.texts: dict[KVSequence, list[int]] = {}  # tokens of every live sequence
        self.computed: dict[KVSequence, int] = {}
        self.memory: dict[tuple[str, int], dict[int, int]] = {}  # (pool, block) -> offset -> token; of states -> text
        self.names = itertools.count(1)

    def fresh(self, count: int) -> list[int]:
        return [next(self.names) for _ in range(count)]

    def pick(self, data: st.DataObject) -> KVSequence:
        return data.draw(st.sampled_from(sorted(self.texts, key=lambda s: (s.role, s.row))))

    @rule(role=ROLES, tokens=st.integers(0, 11))
    def open(self, role: str, tokens: int) -> None:
        text = self.fresh(tokens)
        sequence = self.tables[role].open(role, text)
        assert sequence not in self.texts
        self.texts[sequence], self.computed[sequence] = text, 0

    @rule(role=ROLES, prompt=st.integers(0, 2), tokens=st.integers(1, 14), more=st.integers(0, 3))
    def open_what_may_be_cached(self, role: str, prompt: int, tokens: int, more: int) -> None:
        text = [-1 - prompt * 100 - i for i in range(tokens)] + self.fresh(more)
        table = self.tables[role]
        sequence = table.open(role, text)
        self.texts[sequence], self.computed[sequence] = text, int(table.computed[sequence.row])

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=st.integers(1, 6))
    def append(self, data: st.DataObject, tokens: int) -> None:
        sequence = self.pick(data)
        text = self.fresh(tokens)
        self.tables[sequence.role].append(sequence, text)
        self.texts[sequence] += text

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), role=ROLES)
    def append_one_to_each(self, data: st.DataObject, role: str) -> None:
        sequences = [s for s in self.texts if s.role == role and data.draw(st.booleans())]
        if sequences:
            drawn = self.fresh(len(sequences))
            rows = np.array([s.row for s in sequences])
            self.tables[role].write_tokens(rows, self.tables[role].lengths[rows], np.array(drawn))
            for sequence, token in zip(sequences, drawn, strict=True):
                self.texts[sequence].append(token)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        child = self.tables[sequence.role].fork(sequence)
        self.texts[child], self.computed[child] = list(self.texts[sequence]), self.computed[sequence]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        self.tables[sequence.role].release(sequence)
        del self.texts[sequence], self.computed[sequence]

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), role=ROLES)
    def compute(self, data: st.DataObject, role: str) -> None:
        """Write some pending tokens of several sequences at once, as one engine step does."""
        pending = [s for s in self.texts if s.role == role and len(self.texts[s]) > self.computed[s]]
        chosen = [s for s in pending if data.draw(st.booleans())]
        counts = [data.draw(st.integers(1, len(self.texts[s]) - self.computed[s])) for s in chosen]
        table = self.tables[role]
        table.prefixes.begin_step()
        counts = [table.prefixes.tokens_to_stop(s.row, count) for s, count in zip(chosen, counts, strict=True)]
        if not chosen:
            return
        rows = np.array([s.row for s in chosen])
        before = [table.blocks.copy(), *(pool.ref_counts.copy() for pool in table.pools)]
        try:
            copies = table.prepare_write(rows, np.array(counts))
        except PoolExhaustedError:
            assert not table.has_room(table.blocks_needed(rows, np.array(counts)))
            after = [table.blocks, *(pool.ref_counts for pool in table.pools)]
            assert all(map(np.array_equal, before, after)), "nothing has changed"
            return
        for pool, (sources, destinations) in zip(table.pools, copies, strict=True):
            self.check_copies(chosen, pool, sources, destinations)
            copied = [dict(self.memory[pool.name, source]) for source in sources]
            for destination, content in zip(destinations, copied, strict=True):
                self.memory[pool.name, destination] = content
        for sequence, count in zip(chosen, counts, strict=True):
            start = self.computed[sequence]
            for pool, blocks in zip(table.pools, table.blocks[:, sequence.row], strict=True):
                if pool.holds_states:
                    self.write_state(pool, sequence, table, count)
                    continue
                for position in range(start, start + count):
                    block = int(blocks[position // BLOCK_SIZE])
                    assert pool.ref_counts[block] == 1, "a shared block is about to be written"
                    offsets = self.memory.setdefault((pool.name, block), {})
                    offsets[position % BLOCK_SIZE] = self.texts[sequence][position]
            self.computed[sequence] = start + count
            table.computed[sequence.row] = start + count
            table.prefixes.register(sequence.row, start + count)
        table.free_passed(rows)

    def check_copies(
        self, chosen: list[KVSequence], pool: BlockPool, sources: list[int], destinations: list[int]
    ) -> None:
        written = [s for s in chosen if self.computed[s] % BLOCK_SIZE or (pool.holds_states and self.computed[s])]
        assert len(sources) == len(destinations) <= len(written), "only partial tails and states are copied"
        if pool.holds_states:
            return  # a state that only the cache keeps may be evicted once it is copied
        assert not set(sources) & set(destinations)
        assert len(set(destinations)) == len(destinations)
        assert all(pool.ref_counts[source] > 0 for source in sources), "a tail was copied that nobody else holds"

    def write_state(self, pool: BlockPool, sequence: KVSequence, table: SequenceTable, count: int) -> None:
        (state,) = table.block_table(sequence, table.pools.index(pool)).tolist()
        assert pool.ref_counts[state] == 1, "a shared state is about to be written"
        assert state not in pool.cache, "a cached state is about to be written"
        start = self.computed[sequence]
        before = self.memory.get((pool.name, state), {}) if start else {}
        assert list(before.values()) == self.texts[sequence][:start], "it goes on from another text's state"
        self.memory[pool.name, state] = dict(enumerate(self.texts[sequence][: start + count]))

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for sequence, text in self.texts.items():
            table = self.tables[sequence.role]
            assert table.token_ids(sequence) == text
            for group, pool in enumerate(table.pools):
                self.check_reads(table, sequence, group, pool)

    def check_reads(self, table: SequenceTable, sequence: KVSequence, group: int, pool: BlockPool) -> None:
        text, computed = self.texts[sequence], self.computed[sequence]
        if pool.holds_states:
            held = [
                list(self.memory[pool.name, state].values()) for state in table.block_table(sequence, group).tolist()
            ]
            assert held == ([text[:computed]] if computed else []), "a sequence holds the state of its computed tokens"
            return
        passed = 0 if pool.window is None else max(0, computed - pool.window) // BLOCK_SIZE
        blocks = table.blocks[group, sequence.row, : -(-computed // BLOCK_SIZE)].tolist()
        assert blocks == [-1] * passed + table.block_table(sequence, group).tolist(), "they cover what may be seen"
        seen = range(passed * BLOCK_SIZE, computed)
        read = [self.memory[pool.name, blocks[p // BLOCK_SIZE]][p % BLOCK_SIZE] for p in seen]
        assert read == text[passed * BLOCK_SIZE : computed]

    @invariant()
    def the_pools_are_whole(self) -> None:
        check(self.pools, {name: self.live_block_tables(pool) for name, pool in self.pools.items()})
        for role, table in self.tables.items():
            assert table.live_sequences == sum(s.role == role for s in self.texts)

    def live_block_tables(self, pool: BlockPool) -> list[np.ndarray]:
        table = self.tables[pool.role]
        return table.live_block_tables(table.pools.index(pool))

    def teardown(self) -> None:
        for sequence in list(self.texts):
            self.tables[sequence.role].release(sequence)
        check(self.pools, {name: [] for name in self.pools})
        assert all(pool.live_blocks == 0 for pool in self.pools.values())
        assert self.pools["generator"].kv_pool.available_slabs == 8


class WindowedSequenceMachine(SequenceMachine):
    window = 6


class RecurrentSequenceMachine(SequenceMachine):
    states = True

    @precondition(lambda self: any(s.role == "generator" for s in self.texts))
    @rule(data=st.data(), fewer=st.integers(0, 3))
    def go_back(self, data: st.DataObject, fewer: int) -> None:
        """Fork fewer tokens, or drop some: a sequence keeps its state as long as it has all the tokens of it."""
        sequence = data.draw(
            st.sampled_from(sorted((s for s in self.texts if s.role == "generator"), key=lambda s: s.row))
        )
        table, text = self.tables["generator"], self.texts[sequence]
        length = max(0, len(text) - fewer)
        kept = self.computed[sequence] if self.computed[sequence] <= length else 0
        if data.draw(st.booleans()):
            child = table.fork(sequence, length)
            self.texts[child], self.computed[child] = text[:length], kept
        else:
            table.truncate(sequence.row, length)
            self.texts[sequence], self.computed[sequence] = text[:length], kept

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def give_all_up(self, data: st.DataObject) -> None:
        """Free what every generator sequence holds, and look them up in the cache again, which has all of it."""
        table = self.tables["generator"]
        before = dict(self.computed)
        table.drop_kv_of(table.of_owner(None))
        table.prefixes.begin_step()
        for sequence in [s for s in self.texts if s.role == "generator"]:
            assert table.prefixes.match(sequence.row, len(self.texts[sequence])) or not table.computed[sequence.row]
            self.computed[sequence] = int(table.computed[sequence.row])
            assert self.computed[sequence] >= before[sequence]


TestSequenceMachine = SequenceMachine.TestCase
TestWindowedSequenceMachine = WindowedSequenceMachine.TestCase
TestRecurrentSequenceMachine = RecurrentSequenceMachine.TestCase
TestSequenceMachine.settings = TestWindowedSequenceMachine.settings = settings(max_examples=60, stateful_step_count=40)
TestRecurrentSequenceMachine.settings = TestSequenceMachine.settings
