"""Sampling a whole batch at once, with randomness that depends on the node and never on the batch."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from espalier.engine.work import NO_PENALTIES, Penalties, Sampling
from espalier.kernels.backend import Backend
from espalier.kernels.sampling import FILTERED, Filters, TokenPenalties

_INCREMENT = 0x9E3779B97F4A7C15
"""Added by SplitMix64 for each position."""
TokensBefore = Callable[[np.ndarray], tuple[torch.Tensor, torch.Tensor]]
"""Gives the tokens before the draws from some rows, int64 `[R]`: int32 `[R, length]` and, int64 `[R]`, how many count.

Both are on the device of the logits.
"""


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A random number in [0, 1) for each (key, position): SplitMix64 (Steele et al., 2014), counted by the position.

    Args:
        keys: uint64 `[B]`.
        positions: int `[B]`.

    Returns:
        float64 `[B]`.
    """
    x = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_INCREMENT)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def key_after(key: int, draws: int) -> int:
    """The stream that goes on where `draws` draws of another have been taken, so that these can be split at any place.

    `uniforms` of it at a position is that of `key` at the position `draws` later.
    """
    return (key + draws * _INCREMENT) % 2**64


def _nothing_before(rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    raise AssertionError(f"{len(rows)} draws have penalties on tokens that nobody gives")


ROWS_AT_A_TIME = 256
"""Rows of logits that are drawn from at a time; those of a large vocabulary take gigabytes by the thousand."""


class Sampler:
    """The draws of a step, in portions; made once while they stay the same."""

    def __init__(self, samplings: Sequence[Sampling], rows: np.ndarray, device: torch.device, backend: Backend) -> None:
        """Put the parameters of draws on `device`; arguments as of `SamplingBatch`."""
        self._portions: list[tuple[slice, slice, SamplingBatch]] = []
        for draws in _portions(samplings, rows):
            first, last = int(rows[draws][0]), int(rows[draws][-1])
            batch = SamplingBatch(samplings[draws], rows[draws] - first, device, backend)
            self._portions.append((draws, slice(first, last + 1), batch))

    def draw(
        self,
        head: Callable[[torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        positions: np.ndarray,
        allowed: np.ndarray | None = None,
        before: TokensBefore = _nothing_before,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw tokens as `SamplingBatch.draw` does.

        Args:
            head: hidden states to logits.
            hidden: `[B, hidden]`.
            positions: int `[D]`, of the tokens drawn.
            allowed: of each row, see `SamplingBatch.draw`.
            before: see there.
        """
        found = [
            batch.draw(
                head(hidden[rows]),
                positions[draws],
                None if allowed is None else allowed[rows],
                lambda its, first=rows.start: before(its + first),
            )
            for draws, rows, batch in self._portions
        ]
        if len(found) == 1:
            return found[0]
        token_ids, log_probabilities = zip(*found, strict=True)
        return torch.cat(token_ids), torch.cat(log_probabilities)


_OF_DRAW = attrgetter("temperature", "top_k", "top_p", "min_p", "banned", "penalties")
"""All of `Sampling` but the key."""


def _groups(samplings: Sequence[Sampling], rows: np.ndarray) -> tuple[list[Any], np.ndarray, np.ndarray]:
    """Groups of draws in a row that share the work on a row of logits, as they differ in nothing but their key.

    Returns:
        The parameters that there are, without repetition; of each group which of these it has, int64 `[G]`, and its
        first draw, int64 `[G]`.
    """
    of_draw = list(map(_OF_DRAW, samplings))
    kinds = list(dict.fromkeys(of_draw))
    number = {kind: i for i, kind in enumerate(kinds)}
    kind = np.fromiter(map(number.__getitem__, of_draw), np.int64, len(of_draw))
    first = np.ones(len(of_draw), dtype=bool)
    first[1:] = (rows[1:] != rows[:-1]) | (kind[1:] != kind[:-1])
    begins = np.flatnonzero(first)
    return kinds, kind[begins], begins


def _portions(samplings: Sequence[Sampling], rows: np.ndarray) -> list[slice]:
    """Draws that need at most `ROWS_AT_A_TIME` rows of logits: one for each row, and for each of its parameters."""
    if len(samplings) <= ROWS_AT_A_TIME:
        return [slice(0, len(samplings))]
    begins = _groups(samplings, rows)[2][::ROWS_AT_A_TIME].tolist()
    return [slice(begin, end) for begin, end in zip(begins, [*begins[1:], len(samplings)], strict=True)]


class SamplingBatch:
    """The sampling parameters of D draws, on the device of their logits; made once while the draws stay the same."""

    def __init__(self, samplings: Sequence[Sampling], rows: np.ndarray, device: torch.device, backend: Backend) -> None:
        """Put the parameters on `device`, where `backend` draws by them.

        Args:
            samplings: of each draw.
            rows: int64 `[D]`, the row of the logits that each draw is from, ascending; every row has one.
            device: of the logits.
            backend: filters and draws. Draws of a row that differ in nothing but their key share its work.
        """
        self._backend = backend
        # Written in each step: to touch new pages takes a CPU as long as to mask.
        self._changed: torch.Tensor | None = None
        self._keys = np.array([s.key for s in samplings], dtype=np.uint64)
        kinds, kind_of, begins = _groups(samplings, rows)
        temperatures, top_k, top_p, min_p, banned, penalties = list(zip(*kinds, strict=True)) or [()] * 6
        group_rows = rows[begins]

        def tensor(values: np.ndarray) -> torch.Tensor:
            return backend.to_device(values, device)

        def of_groups(values: Sequence[float], dtype: type = np.float32) -> torch.Tensor:
            return tensor(np.array(values, dtype=dtype)[kind_of])

        everyone = np.arange(len(begins))
        self._group_of = tensor(np.repeat(everyone, np.diff(begins, append=len(samplings))))
        # A row whose draws differ in their parameters is given once for each.
        parted = len(everyone) and len(everyone) > group_rows[-1] + 1
        self._rows = group_rows if parted else None
        self._logit_rows = tensor(group_rows) if parted else None
        self._temperatures = of_groups(temperatures)
        numbers = kind_of.tolist()
        pairs = [(i, token) for i, kind in enumerate(numbers) for token in banned[kind]] if any(banned) else []
        self._banned = tuple(tensor(np.array(ids, dtype=np.int64)) for ids in zip(*pairs, strict=True))
        some = any(its is not NO_PENALTIES for its in penalties)
        of_rows = [penalties[kind] for kind in numbers] if some else []
        self._penalties = PenaltyBatch(of_rows, group_rows, device, backend) if some else None
        filters = np.array([k > 0 or p < 1 or m > 0 for k, p, m in zip(top_k, top_p, min_p, strict=True)], dtype=bool)
        self._filters: Filters | None = None
        if len(filtered := np.flatnonzero(filters[kind_of])):
            self._filters = Filters(tensor(filtered), of_groups(top_k, np.int64), of_groups(top_p), of_groups(min_p))

    def draw(
        self,
        logits: torch.Tensor,
        positions: np.ndarray,
        allowed: np.ndarray | None = None,
        before: TokensBefore = _nothing_before,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw tokens; a draw depends on its row's logits and tokens, its own parameters and position alone.

        Args:
            logits: `[B, vocabulary]`.
            positions: int `[D]`, of the tokens drawn.
            allowed: uint8 `[B, ceil(vocabulary / 8)]`, a bit for each token that may be drawn from a row, the lowest
                one first; None where any may. The filters count what is left.
            before: asked for the tokens before draws whose penalties read them.

        Returns:
            Token ids int64 `[D]`, and their log-probabilities under the untempered model, without penalties, float32
            `[D]`.
        """
        logits = logits if self._logit_rows is None else logits[self._logit_rows]
        logits = logits if self._backend.reads_any_logits else logits.float()
        draws = self._backend.to_device(uniforms(self._keys, positions), logits.device)
        drawn = logits, self._candidates(logits, allowed, before), self._temperatures, draws, self._group_of
        if self._filters is None:
            return self._backend.draw_tokens(*drawn)
        return self._backend.draw_filtered(*drawn, self._filters)

    def _candidates(self, given: torch.Tensor, allowed: np.ndarray | None, before: TokensBefore) -> torch.Tensor:
        """Logits `[B, vocabulary]` as penalties leave them, float32 then, with a mask over what must not be drawn.

        Those `given` stay as they are, as log-probabilities are told of them.
        """
        logits = given
        if self._penalties:
            self._changed = logits = self._penalties.apply(given, before, self._changed)
        if allowed is not None:
            allowed = allowed if self._rows is None else allowed[self._rows]
            self._changed = logits = self._backend.mask_tokens(
                logits, self._backend.to_device(allowed, logits.device), self._changed
            )
        if self._banned:
            logits = logits.clone() if logits is given else logits
            logits[self._banned] = FILTERED
        return logits


class PenaltyBatch:
    """The penalties of B rows of logits, on their device; made once while the rows' draws stay the same."""

    def __init__(
        self, penalties: Sequence[Penalties], rows: np.ndarray, device: torch.device, backend: Backend
    ) -> None:
        """Put them on `device`, where `backend` penalizes.

        Args:
            penalties: of each row.
            rows: int64 `[B]`, by which its tokens are asked for.
            device: of the logits.
            backend: its operations.
        """
        self._backend = backend
        reading = [i for i, its in enumerate(penalties) if its.read_tokens]
        self._rows = rows[reading]
        columns = ("prompt_tokens", np.int64), *((n, np.float32) for n in ("repetition", "presence", "frequency"))
        values = [np.array([getattr(penalties[i], name) for i in reading], kind) for name, kind in columns]
        self._places, self._starts, *self._values = (
            backend.to_device(array, device) for array in (np.array(reading, np.int64), *values)
        )
        biased = [(i, *each) for i, its in enumerate(penalties) for each in its.bias]
        columns = zip(zip(*biased, strict=True), (np.int64, np.int64, np.float32), strict=False)
        self._bias = [backend.to_device(np.array(column, kind), device) for column, kind in columns]

    def apply(self, given: torch.Tensor, before: TokensBefore, out: torch.Tensor | None) -> torch.Tensor:
        """Penalized logits, float32 `[B, vocabulary]`.

        Args:
            given: the logits, which stay as they are.
            before: asked for the tokens of rows whose penalties read them.
            out: written to and returned; None for new memory.
        """
        if out is None:
            out = torch.empty_like(given, dtype=torch.float32, memory_format=torch.contiguous_format)
        out.copy_(given)
        if self._bias:
            rows, tokens, values = self._bias
            out[rows, tokens] += values
        if len(self._rows):
            tokens, ends = before(self._rows)
            self._backend.penalize_tokens(out, TokenPenalties(self._places, tokens, self._starts, ends, *self._values))
        return out
