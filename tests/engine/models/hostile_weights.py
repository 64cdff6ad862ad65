"""Hostile weight files: safetensors, `.bin`, and indices of shards; see `hostile_checkpoints`."""

import struct

import torch
from hostile_changes import (
    BIN,
    CONFIG,
    EMBEDDING,
    GATE,
    HEAD,
    INDEX,
    NORM,
    WEIGHTS,
    Hostile,
    Payload,
    as_bin,
    filled,
    header_edited,
    in_turn,
    linked,
    made_folder,
    named_tensor,
    set_fields,
    sharded,
    written,
)
from safetensors.torch import load_file
from tiny_models import edit_tensors

IN_WEIGHTS = [
    Hostile("weights of whole numbers", named_tensor(GATE, lambda t: t.to(torch.int64)), (WEIGHTS, GATE, "I64")),
    Hostile("weights of bytes", named_tensor(NORM, lambda t: t.to(torch.uint8)), (WEIGHTS, NORM, "U8")),
    Hostile("weights of true and false", named_tensor(GATE, lambda t: t > 0), (WEIGHTS, GATE, "BOOL")),
    Hostile("a weight is NaN", named_tensor(GATE, filled(float("nan"))), (WEIGHTS, GATE), values=True),
    Hostile("a norm is infinite", named_tensor(NORM, filled(float("inf"))), (WEIGHTS, NORM), values=True),
    Hostile("an embedding is NaN", named_tensor(EMBEDDING, filled(float("nan"))), (WEIGHTS, EMBEDDING), values=True),
    Hostile(
        "a double beyond a float", named_tensor(NORM, lambda t: filled(1e300)(t.double())), (WEIGHTS, NORM), values=True
    ),
    Hostile("weights in double precision", named_tensor(GATE, torch.Tensor.double), outcome="same"),
    Hostile("a scalar for a norm", named_tensor(NORM, torch.tensor(1.0)), (NORM, "shape")),
    Hostile("a weight of nothing", named_tensor(GATE, torch.zeros(0, 32)), (GATE, "shape")),
    Hostile("a weight too many", named_tensor("model.layers.0.mlp.up_proj.bias", torch.zeros(48)), ("up_proj.bias",)),
    Hostile("a tied head of other values", named_tensor(HEAD, torch.zeros(338, 32)), (CONFIG, HEAD), "warned"),
    Hostile("a tied head of another shape", named_tensor(HEAD, torch.zeros(300, 32)), (CONFIG, HEAD, "shape")),
    Hostile("a head of whole numbers", named_tensor(HEAD, torch.zeros(338, 32, dtype=torch.int64)), (WEIGHTS, HEAD)),
    Hostile(
        "a tied head of the same values",
        lambda folder: edit_tensors(folder / WEIGHTS, {HEAD: load_file(folder / WEIGHTS)[EMBEDDING].clone()}),
        outcome="same",
    ),
    Hostile("no head", in_turn(set_fields(CONFIG, tie_word_embeddings=False)), (HEAD,)),
    Hostile("a header of 2^63 bytes", written(WEIGHTS, struct.pack("<Q", 2**63) + b"{}"), (WEIGHTS,)),
    Hostile("a header longer than the file", written(WEIGHTS, struct.pack("<Q", 10**6) + b"{}"), (WEIGHTS,)),
    Hostile("a header that is no JSON", written(WEIGHTS, struct.pack("<Q", 4) + b"{{{{"), (WEIGHTS,)),
    Hostile("an empty header", written(WEIGHTS, struct.pack("<Q", 2) + b"{}"), (EMBEDDING.removeprefix("model."),)),
    Hostile("zeros", written(WEIGHTS, bytes(4096)), (WEIGHTS,)),
    Hostile("an offset beyond the file", header_edited(lambda h: h[NORM].update(data_offsets=[0, 2**40])), (WEIGHTS,)),
    Hostile("an offset backwards", header_edited(lambda h: h[NORM].update(data_offsets=[128, 0])), (WEIGHTS,)),
    Hostile("offsets of another tensor", header_edited(lambda h: h[NORM].update(h[GATE])), (WEIGHTS,)),
    Hostile("a shape of 2^62", header_edited(lambda h: h[NORM].update(shape=[2**62, 2**62])), (WEIGHTS,)),
    Hostile("a negative shape", header_edited(lambda h: h[NORM].update(shape=[-32])), (WEIGHTS,)),
    Hostile("a shape of text", header_edited(lambda h: h[NORM].update(shape="32")), (WEIGHTS,)),
    Hostile("an unknown type", header_edited(lambda h: h[NORM].update(dtype="F31")), (WEIGHTS,)),
    Hostile("a file of weights that is a folder", made_folder(WEIGHTS), (WEIGHTS,)),
    Hostile("weights linked to themselves", linked(WEIGHTS, WEIGHTS), (WEIGHTS,)),
]

IN_BIN = [
    Hostile("bin: runs a command", as_bin(lambda held: {**held, "x": Payload()}), (BIN, "could run code")),
    Hostile("bin: a list", as_bin(lambda held: list(held.values())), (BIN,)),
    Hostile("bin: nested", as_bin(lambda held: {"state": held}), (BIN,)),
    Hostile("bin: numbers for names", as_bin(lambda held: dict(enumerate(held.values()))), (BIN,)),
    Hostile("bin: sparse", as_bin(lambda held: held | {GATE: held[GATE].to_sparse()}), (BIN, GATE)),
    Hostile("bin: whole numbers", as_bin(lambda held: held | {GATE: held[GATE].int()}), (BIN, GATE, "int32")),
    Hostile(
        "bin: complex", as_bin(lambda held: held | {GATE: held[GATE].to(torch.complex64)}), (BIN, GATE, "complex64")
    ),
    Hostile("bin: NaN", as_bin(lambda held: held | {GATE: filled(float("nan"))(held[GATE])}), (BIN, GATE), values=True),
    Hostile("bin: nothing", as_bin(lambda held: {}), (BIN,)),
    Hostile("bin: text", in_turn(as_bin(dict), written(BIN, "hello")), (BIN,)),
    Hostile("bin: an old one", as_bin(dict, _use_new_zipfile_serialization=False), outcome="same"),
    Hostile("bin: shared memory", as_bin(lambda held: held | {HEAD: held[EMBEDDING]}), outcome="same"),
]

IN_INDEX = [
    Hostile("index: shards", sharded(), outcome="same"),
    Hostile("index: a tensor in two shards", sharded(both=(NORM,)), (NORM, "model-00001", "model-00002")),
    Hostile(
        "index: a shard that is missing", sharded({NORM: "model-9.safetensors"}), ("model-9.safetensors",), values=True
    ),
    Hostile("index: a shard elsewhere", sharded({NORM: "../other/model.safetensors"}), (INDEX, "../other")),
    Hostile("index: an absolute shard", sharded({NORM: "/etc/passwd"}), (INDEX, "/etc/passwd")),
    Hostile("index: a shard with a NUL", sharded({NORM: "a\0b"}), (INDEX,)),
    Hostile("index: a number for a shard", sharded({NORM: 7}), (INDEX, "weight_map")),
    Hostile("index: a list", sharded([NORM]), (INDEX, "weight_map")),
    Hostile("index: empty", sharded({}), (INDEX, "weight_map")),
    Hostile("index: no JSON", in_turn(sharded(), written(INDEX, "{")), (INDEX,)),
    Hostile("index: itself a shard", sharded({NORM: INDEX}), (INDEX,)),
]

CASES = [*IN_WEIGHTS, *IN_BIN, *IN_INDEX]
