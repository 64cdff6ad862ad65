"""The contract of a unit that multiplies rows with panels of a weight: `tiles`, on vectors, and `amx`."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np


class Microkernel(Protocol):
    """A module of functions that compiled code calls; nothing that they are given is checked.

    Attributes:
        TILE_ROWS: rows that the products write at a time, perhaps beyond the last.
        configure: prepares this thread's unit.
        release: lets go of it.
        scratch: `scratch()` makes scratch memory for products, one for each thread.
        pack_row: `pack_row(row, start, inner, first, count, x, r)` stores `count` elements of a flat array, from
            `start` on, as row `r` of `x`, rows of `inner` elements, from column `first` on.
        multiply_columns: `multiply_columns(x, first, rows, inner, column, count, panel, panel_at, out, out_start,
            out_stride, scratch)` adds the product of `count` columns of `x`, from `column` on, and a panel of a weight,
            flat float32 `[count, PANEL]` from `panel_at` on, to `out`. `rows` rows of `x` are multiplied, from `first`
            on; those of `out`, flat float32, lie `out_stride` apart, from `out_start` on.
        multiply_panel: `multiply_panel(x, first, rows, inner, panels, panel_at, prefetch_at, terms, terms_start,
            terms_stride, out, out_start, out_stride, scratch)` writes the product of all columns with the panel that
            begins at `panel_at`. Sums begin with `terms`, rows of PANEL, `terms_stride` apart, from `terms_start` on:
            either what is in `out`, or one row, with a distance of 0. The panel that is read next begins at
            `prefetch_at`.
    """

    TILE_ROWS: int
    configure: Callable[..., Any]
    release: Callable[..., Any]
    scratch: Callable[..., np.ndarray]
    pack_row: Callable[..., Any]
    multiply_columns: Callable[..., Any]
    multiply_panel: Callable[..., Any]

    def x_size(self, rows: int, inner: int) -> int:
        """Float32 elements that `pack_row` needs for `rows` rows of `inner` elements."""
        ...
