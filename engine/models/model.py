"""A loaded model: its decoder, head, tokenizer, and the token ids that end a generation."""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from espalier.engine.errors import CheckpointError, MisuseError, NoEmbeddingError
from espalier.engine.models.chat.turns import embedded_ends
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.config import DecoderConfig, NativeConfig
from espalier.engine.models.decoder import Decoder, choose_backend_for, keep, load_decoder, read_kept
from espalier.engine.models.options import ModelImpl, Quantization
from espalier.engine.models.quantization import make_quantizer
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.engine.models.zoo.layers import TransformersLayers
from espalier.engine.work import LOG_PROBABILITIES, TOP_TOKENS
from espalier.kernels.backend import Backend
from espalier.kernels.linear import Linear

_HEAD = "lm_head.weight"
_MMAP_THRESHOLD = -3
"""glibc's name of the size from which blocks of memory are the system's own."""

Head = Callable[..., torch.Tensor]
"""Hidden states `[R, hidden]` to values `[R, k]`: logits of a generator, scores of a verifier.

A head that gives the probability of given tokens takes their ids too, int64 `[R]`.
"""

_ROWS = 256
"""Rows of logits that are held at once."""


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder with its heads and tokenizer.

    Attributes:
        decoder: token ids to hidden states.
        head: what Generate samples from and Score reads.
        tokenizer: of the decoder's vocabulary.
        eos_token_ids: tokens that end a generation.
        digest: of the checkpoint.
        other_heads: further heads on the same hidden states, by the name that a Score gives, so that one model and one
            KV serve both to generate and to verify.
        wide_heads: names of heads, empty for `head`, that read the states of the decoder's `taps`, too: rows
            `[R, (1 + taps) * hidden]`, those after the last layer first.
    """

    decoder: Decoder
    head: Head
    tokenizer: TextTokenizer
    eos_token_ids: tuple[int, ...]
    digest: str
    other_heads: Mapping[str, Head] = field(default_factory=dict[str, Head])
    wide_heads: frozenset[str] = frozenset()

    def head_named(self, name: str) -> Head:
        """One of `other_heads`, `LOG_PROBABILITIES`, or `head` for an empty name.

        Raises:
            MisuseError: when the model has no such head.
        """
        if not name:
            return self.head
        if name == LOG_PROBABILITIES:
            return partial(_log_probabilities, self.head)
        if (head := self.other_heads.get(name)) is None:
            raise MisuseError(f"the model has no head {name!r}; it has {', '.join(self.other_heads) or 'one only'}")
        return head

    @property
    def config(self) -> DecoderConfig:
        """The decoder's shape."""
        return self.decoder.config

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, with a generator's head unless it reads the embedding; a verifier's head is small.

        On a CPU in float32 even a tied head has a copy of its own: products read another order than the embedding's.
        """
        head = self.head
        if not isinstance(head, Linear) or head.keeps(self.decoder.embedding):
            return self.decoder.weight_bytes
        return self.decoder.weight_bytes + head.nbytes

    @property
    def without_embedding(self) -> dict[int, str]:
        """Tokens of the tokenizer that the model has no embedding for, by id, in order of id."""
        return dict(sorted((i, token) for token, i in self.tokenizer.vocabulary.items() if i >= self.config.vocab_size))

    def require_embedded(self, role: str, token_ids: Sequence[int]) -> None:
        """Check that the model can be fed `token_ids`.

        Raises:
            NoEmbeddingError: when the model has no embedding for some of them; it names these, and `role`.
            MisuseError: for negative ids.
        """
        if not token_ids:
            return
        if max(token_ids) >= (rows := self.config.vocab_size):
            beyond = sorted({i for i in token_ids if i >= rows})
            raise NoEmbeddingError(role, {i: self.tokenizer.token(i) for i in beyond})
        if min(token_ids) < 0:
            raise MisuseError(f"token ids of the {role} are negative")


def _log_probabilities(head: Head, hidden: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
    """The head `LOG_PROBABILITIES`; a target's value is that of the same token among the likeliest, to the bit."""
    found: list[torch.Tensor] = []
    wanted = [None] * len(hidden) if targets is None else targets.split(_ROWS)
    for rows, its in zip(hidden.split(_ROWS), wanted, strict=False):
        log_probabilities = torch.log_softmax(head(rows).float(), dim=-1)
        top, ids = log_probabilities.topk(min(TOP_TOKENS, log_probabilities.shape[-1]))
        top, ids = (F.pad(each, (0, TOP_TOKENS - each.shape[-1])) for each in (top, ids.float()))
        target = top.new_zeros(len(rows), 1) if its is None else log_probabilities.gather(1, its[:, None])
        found.append(torch.cat([target, ids, top], dim=-1))
    return torch.cat(found)


@contextmanager
def _freed_at_once() -> Iterator[None]:
    """Have glibc give each large block back as it is freed; by default it keeps holes as large as a model."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_MMAP_THRESHOLD, 2**18)
    try:
        yield
    finally:
        if mallopt:
            mallopt(_MMAP_THRESHOLD, 2**25)  # what it comes to by itself


@_freed_at_once()
def load_trunk(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    """The decoder of a checkpoint of any supported architecture, without its head.

    Raises:
        CheckpointError: when the architecture is not supported, or a weight is missing.
    """
    config = checkpoint.decoder_config
    if isinstance(config, NativeConfig):
        return load_decoder(checkpoint, config, dtype, device)
    from espalier.engine.models.zoo.loading import load_transformers_decoder

    return load_transformers_decoder(checkpoint, dtype, device)


def language_model_head(checkpoint: Checkpoint, decoder: Decoder, quantised: bool = False) -> Head:
    """The head that gives next-token logits, tied to the embedding where the checkpoint says so.

    Args:
        checkpoint: what to read.
        decoder: of the same checkpoint.
        quantised: keep it in int8 where the backend has a product of its own for that; a step reads all of it.

    Raises:
        CheckpointError: when the head is untied and missing.
    """
    if isinstance(decoder.layers, TransformersLayers):
        if decoder.layers.head is None:
            raise CheckpointError(f"{checkpoint.folder} has no head over the vocabulary")
        return decoder.layers.head
    tied = decoder.embedding if decoder.config.tied else None
    return _head(checkpoint, decoder.backend, decoder.dtype, decoder.device, quantised, tied)


@_freed_at_once()
def _head(
    checkpoint: Checkpoint,
    backend: Backend,
    dtype: torch.dtype,
    device: torch.device | str,
    quantised: bool,
    tied: torch.Tensor | None = None,
) -> Head:
    """The head of a decoder that native code runs; `tied` is the embedding that it is one with."""
    if tied is not None:
        checkpoint.mark_used(_HEAD)

    def read() -> torch.Tensor:
        shape = checkpoint.decoder_config.vocab_size, checkpoint.decoder_config.hidden_size
        return checkpoint.take(_HEAD, dtype, device, shape) if tied is None else tied

    if not quantised or not backend.quantized_packer():
        return backend.prepare_linear(read())
    if kept := read_kept(checkpoint, "head", backend, dtype):
        return backend.prepare_linear(backend.weight_of_kept(kept))
    used, weight = checkpoint.used, read()
    weight = make_quantizer(Quantization.INT8, backend, weight.dtype, weight.device)(weight, 0)
    if kept := backend.keep_weight(weight):
        keep(checkpoint, "head", backend, dtype, kept, used)
    return backend.prepare_linear(weight)


def load_generator(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Model:
    """Load a `*ForCausalLM` checkpoint.

    Raises:
        CheckpointError: when the checkpoint holds another kind of model, or is incomplete.
    """
    if not checkpoint.has_language_head:
        name = checkpoint.architecture or "model without architecture"
        advice = "give a *ForCausalLM model to --generator, and a reward model to --verifier"
        raise CheckpointError(f"{checkpoint.folder} is a {name}, not a generator; {advice}")
    tokenizer = TextTokenizer(checkpoint)  # so that its faults are found before gigabytes are read
    head, config = None, checkpoint.decoder_config
    quantised = checkpoint.quantization is not Quantization.NONE
    if config.impl is ModelImpl.NATIVE and not config.tied:  # first: unquantised it may be the largest tensor of all
        head = _head(checkpoint, choose_backend_for(checkpoint, dtype, device), dtype, device, quantised)
    decoder = load_trunk(checkpoint, dtype, device)
    head = head or language_model_head(checkpoint, decoder, quantised)
    eos = embedded_ends(checkpoint, tokenizer, decoder.config.vocab_size)
    checkpoint.require_all_taken()  # which closes its files
    return Model(decoder, head, tokenizer, eos, checkpoint.digest())
