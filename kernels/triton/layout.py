"""How a block lies in memory for GPUs: keys of a head token by token like values, so that rows are loaded whole."""

from typing import ClassVar

from espalier.kernels.layout import KVLayout


class TokenMajorLayout(KVLayout):
    """`KVLayout` with keys `[kv head][token][head dim]` too."""

    keys_by_token: ClassVar[bool] = True
