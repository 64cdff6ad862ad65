"""Which family a checkpoint is of, by what it holds; family specs; the table in `prm/README.md`."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paths import STEPS, begin, score_path
from tiny_models import edit_json

from espalier.engine.engine import Engine
from espalier.engine.errors import CheckpointError, FamilySpecError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.prm import families
from espalier.prm.families import FamilyMatch, identify, load_verifier, shipped
from espalier.prm.families.spec import read_spec
from espalier.prm.verifier import Verifier

ROOT = Path(__file__).resolve().parents[2]
BY_ITSELF = ["qwen2.5-math-prm", "reasonflux-prm", "skywork-o1-open-prm", "token-classifier", "outcome"]
BY_FLAG = [
    "rlhflow",
    "versaprm",
    "math-shepherd",
    "pure",
    "universal-prm",
    "eurus-prm",
    "thinkprm",
    "yes-no",
    "likelihood",
]
MINIMAL = {
    "name": '"mine"',
    "step.tag": '"<extra_0>"',
    "head.layers": '["score.0", "score.2"]',
}


def chosen(folder: Path, family: str | None = None, reference: bool = False) -> FamilyMatch:
    return identify(Checkpoint(folder), family, reference)


@pytest.fixture
def copy_of(family_folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a family's checkpoint that a test may change."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(family_folders[name], tmp_path / name))

    return copy


@pytest.fixture
def spec_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a family spec from dotted keys and values as TOML has them."""

    def write(changes: dict[str, str | None] | None = None, text: str = "") -> Path:
        merged = {key: value for key, value in (MINIMAL | (changes or {})).items() if value is not None}
        file = tmp_path / "mine.toml"
        file.write_text("\n".join(f"{key} = {value}" for key, value in merged.items()) + f"\n{text}\n")
        return file

    return write


@pytest.mark.parametrize("name", BY_ITSELF)
def test_a_checkpoint_is_told_by_its_class_and_tensors_without_its_weights(
    name: str, family_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    def never(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Checkpoint, "take", never)
    match = chosen(family_folders[name])
    assert match.info.name == name
    assert "architecture" in match.reason


@pytest.mark.parametrize("name", BY_FLAG)
def test_a_class_that_could_be_another_family_or_a_generator_is_not_guessed(name: str, family_folders: dict[str, Path]):
    assert chosen(family_folders[name], name).info.name == name
    if name == "pure":
        match = chosen(family_folders[name])
        assert match.info.name == "token-classifier"
        assert "--verifier-family pure" in match.reason
        return
    with pytest.raises(CheckpointError, match=r"--verifier-family") as error:
        chosen(family_folders[name])
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("math-shepherd", {"▁ки": 12902, "▁+": 648, "▁-": 387}),
        ("rlhflow", {"+": 10, "-": 12, "<|start_header_id|>": 128006, "<|eot_id|>": 128009, "ĊĊ": 271}),
        ("versaprm", {"+": 10, "-": 12, "<|begin_of_text|>": 128000, "ĠĊĊĊĊ": 23535}),
    ],
)
def test_a_published_vocabulary_detects_no_family_for_models_of_several_layouts_share_it(
    name: str, ids: dict[str, int], copy_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
):
    folder = copy_of(name)
    edit_json(folder / "config.json", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    give_ids(folder, ids)
    with pytest.raises(CheckpointError) as error:
        load_verifier(Checkpoint(folder), torch.float32, "cpu")
    message = str(error.value)
    assert (
        "is a LlamaForCausalLM, the class of generators and of the verifiers rlhflow, versaprm, math-shepherd"
        in message
    )
    assert "--verifier-family" in message
    assert "--generator" in message
    assert not caplog.records
    assert chosen(folder, name).info.name == name


def test_any_generator_may_be_asked_as_a_verifier_by_its_flag(copy_of: Callable[[str], Path]):
    folder = copy_of("rlhflow")
    edit_json(folder / "config.json", {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    with pytest.raises(
        CheckpointError,
        match=r"is a Qwen3ForCausalLM, .* of the verifiers yes-no, judge, .*; .*yes-no asks any instruction-tuned",
    ):
        chosen(folder)


def give_ids(folder: Path, ids: dict[str, int]) -> None:
    """Replace a checkpoint's tokenizer by one that has these tokens at these ids."""
    vocabulary = dict(ids)
    taken = set(ids.values())
    vocabulary |= {f"<filler {i}>": i for i in range(max(taken) + 1) if i not in taken}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<filler 0>"}
    blank = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding"))
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model} | blank))


def test_a_reference_model_selects_the_family_of_two(family_folders: dict[str, Path]):
    assert chosen(family_folders["eurus-prm"], reference=True).info.name == "eurus-prm"


def test_the_family_of_two_without_its_reference_is_refused_with_the_flag(family_folders: dict[str, Path]):
    with pytest.raises(CheckpointError, match=r"--verifier-reference, such as Qwen"):
        load_verifier(Checkpoint(family_folders["eurus-prm"]), torch.float32, "cpu", "eurus-prm")


def test_a_reference_for_a_family_that_has_none_is_refused(family_folders: dict[str, Path]):
    reference = Checkpoint(family_folders["eurus-reference"])
    with pytest.raises(CheckpointError, match=r"qwen2\.5-math-prm has no reference model"):
        load_verifier(
            Checkpoint(family_folders["qwen2.5-math-prm"]), torch.float32, "cpu", "qwen2.5-math-prm", reference
        )


def test_a_reference_of_another_shape_or_vocabulary_is_refused(
    family_folders: dict[str, Path], tiny_checkpoints: dict[str, Path]
):
    with pytest.raises(CheckpointError, match=r"num_kv_heads is 2, its reference's is 1"):
        load_verifier(
            Checkpoint(family_folders["eurus-prm"]),
            torch.float32,
            "cpu",
            reference=Checkpoint(tiny_checkpoints["qwen2-tied"]),
        )
    with pytest.raises(CheckpointError, match="different vocabularies"):
        load_verifier(
            Checkpoint(family_folders["eurus-prm"]),
            torch.float32,
            "cpu",
            reference=Checkpoint(family_folders["math-shepherd"]),
        )


def test_an_unknown_family_is_refused_with_the_known_ones(family_folders: dict[str, Path]):
    with pytest.raises(CheckpointError, match=r"--verifier-family 'qwen' is none of qwen2\.5-math-prm, .*\.toml"):
        chosen(family_folders["qwen2.5-math-prm"], "qwen")


def test_a_published_vocabulary_with_another_id_is_refused(copy_of: Callable[[str], Path]):
    folder = copy_of("reasonflux-prm")
    edit_json(folder / "config.json", {"vocab_size": 152064})
    with pytest.raises(CheckpointError, match=r"gives '<extra_0>' the id 3, but published .* have 151651"):
        load_verifier(Checkpoint(folder), torch.float32, "cpu")


def test_a_head_of_another_width_is_refused(copy_of: Callable[[str], Path]):
    from tiny_models import edit_tensors

    folder = copy_of("skywork-o1-open-prm")
    edit_tensors(folder / "model.safetensors", {"v_head.summary.weight": torch.zeros(1, 31)})
    with pytest.raises(
        CheckpointError, match=r"v_head\.summary\.weight has shape \(1, 31\), config.json means \(1, 32\)"
    ):
        load_verifier(Checkpoint(folder), torch.float32, "cpu")


def test_a_template_that_does_not_append_is_refused(copy_of: Callable[[str], Path]):
    folder = copy_of("rlhflow")
    (folder / "chat_template.jinja").write_text("{{ messages | length }}{{ messages[-1].content }}")
    with pytest.raises(CheckpointError, match="does not append turn to turn"):
        load_verifier(Checkpoint(folder), torch.float32, "cpu", "rlhflow")


def test_a_users_family_spec_gives_the_scores_of_the_family_it_describes(
    spec_file: Callable[..., Path],
    family_folders: dict[str, Path],
    verifier_of: Callable[..., tuple[Engine, Verifier]],
):
    system = '"Please reason step by step, and put your final answer within \\\\boxed{}."'
    file = spec_file({"prompt.system": system, "head.unused": '["lm_head.weight"]'})
    folder = family_folders["qwen2.5-math-prm"]
    mine = load_verifier(Checkpoint(folder), torch.float32, "cpu", str(file))
    assert mine.name == "mine"
    assert chosen(folder, str(file)).reason == f"--verifier-family {file}"
    engine, verifier = verifier_of(mine)
    scores = score_path(engine, begin(engine, verifier), STEPS["eight steps"])
    engine, verifier = verifier_of("qwen2.5-math-prm")
    assert scores == score_path(engine, begin(engine, verifier), STEPS["eight steps"])


def test_another_family_spec_of_the_same_name_is_another_verifier(
    spec_file: Callable[..., Path], family_folders: dict[str, Path]
):
    identities = []
    for unused in ('["lm_head.weight"]', '["lm_head.weight", "other"]'):
        file = spec_file({"head.unused": unused})
        family = load_verifier(Checkpoint(family_folders["qwen2.5-math-prm"]), torch.float32, "cpu", str(file))
        identities.append(family.identity)
    assert identities[0] != identities[1]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"stepp.tag": '"x"'}, r"unknown key 'stepp'; known are name, "),
        ({"step.tagg": '"x"'}, r"unknown key 'step\.tagg'"),
        ({"name": None}, r"name is missing"),
        ({"name": "3"}, r"name is 3 and should be a valid string"),
        ({"name": '""'}, r"name is empty"),
        ({"step.tag": None}, r"step\.tag is missing"),
        ({"step.tag": '""'}, r"step\.tag is empty"),
        ({"step.text": '"Step {nummer}: {step}"'}, r"step\.text has the unknown placeholder \{nummer\}"),
        ({"step.text": '"Step {number}"'}, r"step\.text should hold \{step\} once"),
        (
            {"prompt.kind": '"text"', "prompt.text": '"{problem}{problem}"'},
            r"prompt\.text should hold \{problem\} once",
        ),
        ({"prompt.text": '"{problem} "'}, r"prompt\.text and prompt\.begin go with prompt\.kind = 'text'"),
        ({"prompt.kind": '"text"', "prompt.system": '"x"'}, r"prompt\.system goes with prompt\.kind = 'chat'"),
        ({"prompt.kind": '"poem"'}, r"prompt\.kind is 'poem' and should be 'chat' or 'text'"),
        ({"step.encode": '"all"'}, r"step\.encode is 'all' and should be 'pieces' or 'whole'"),
        ({"step.lines": '"yes"'}, r"step\.lines is 'yes' and should be a valid boolean"),
        ({"step.lines": "true", "step.encode": '"whole"'}, r"step\.lines goes with step\.encode = 'pieces'"),
        ({"head.layers": None}, r"head\.layers or head\.tokens is needed"),
        ({"head.tokens": '["+", "-"]'}, r"head\.layers or head\.tokens is needed, and not both"),
        ({"head.layers": "[1]"}, r"head\.layers\.0 is 1 and should be a valid string"),
        ({"head.output": '"tanh"'}, r"head\.output is 'tanh' and should be 'softmax' or 'sigmoid'"),
        ({"head.output": '"sigmoid"'}, r"head\.output = 'sigmoid' goes with one label; head\.labels is 2"),
        ({"head.index": "2"}, r"head\.index is 2 and there are 2 labels"),
        ({"head.labels": "true"}, r"head\.labels is True and should be a valid integer"),
        ({"ids.tokens": '{"+" = "x"}'}, r"ids\.tokens\.\+ is 'x' and should be a valid integer"),
        ({"detection.rope_theta": '"big"'}, r"detection\.rope_theta is 'big' and should be a valid number"),
    ],
)
def test_a_wrong_family_spec_is_refused_naming_the_file_and_the_key(
    changes: dict[str, str | None], problem: str, spec_file: Callable[..., Path]
):
    file = spec_file(changes)
    with pytest.raises(FamilySpecError, match=problem) as error:
        read_spec(file)
    assert str(file) in str(error.value)


def test_a_family_spec_that_is_no_toml_or_is_not_there_is_refused(tmp_path: Path, family_folders: dict[str, Path]):
    file = tmp_path / "mine.toml"
    with pytest.raises(FamilySpecError, match=f"cannot read {file}"):
        chosen(family_folders["qwen2.5-math-prm"], str(file))
    file.write_text("name = ")
    with pytest.raises(FamilySpecError, match="not valid TOML"):
        read_spec(file)


def test_a_family_spec_that_names_a_token_the_tokenizer_lacks_is_refused(
    spec_file: Callable[..., Path], family_folders: dict[str, Path]
):
    checkpoint = Checkpoint(family_folders["qwen2.5-math-prm"])
    for changes, problem in (
        ({"step.tag": '"<score>"'}, "no token <score>, where scores are read"),
        ({"head.layers": None, "head.tokens": '["good", "bad"]'}, "no token good, which head.tokens of"),
        ({"prompt.kind": '"text"', "prompt.begin": '["bos_token", "<s>"]'}, "has none of bos_token, <s>"),
    ):
        changes = {"head.unused": '["lm_head.weight"]'} | changes
        with pytest.raises(CheckpointError, match=problem):
            load_verifier(checkpoint, torch.float32, "cpu", str(spec_file(changes)))


def test_a_tag_that_the_text_swallows_is_an_error_and_not_a_wrong_place(
    spec_file: Callable[..., Path], family_folders: dict[str, Path]
):
    changes = {"prompt.kind": '"text"', "step.tag": '"\\n"', "step.text": '"{step}\\n"', "step.encode": '"whole"'}
    file = spec_file(changes | {"head.layers": '["score"]'})
    with pytest.raises(CheckpointError, match=r"the tag '\\n' is merged with the text before it"):
        load_verifier(Checkpoint(family_folders["token-classifier"]), torch.float32, "cpu", str(file))


def test_every_shipped_family_spec_is_one_of_the_families():
    files = sorted(file.stem for file in Path(families.__file__).parent.glob("*.toml"))
    names = {family.info.name for family in shipped()}
    assert len(files) >= 2
    assert set(files) <= names
    assert all(read_spec(Path(families.__file__).with_name(f"{name}.toml")).name == name for name in files)


def test_the_readmes_table_has_a_row_for_every_family_with_its_classes_and_its_score():
    readme = (ROOT / "prm" / "README.md").read_text(encoding="utf-8")
    table = readme.partition("| --- |")[2].partition("\n\n")[0].splitlines()[1:]
    rows = [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in table]
    assert [(row[0], row[2], row[7]) for row in rows] == [
        (f"`{info.name}`", ", ".join(f"`{name}`" for name in info.architectures) or "any, by its flag", info.score)
        for info in (family.info for family in shipped())
    ]
