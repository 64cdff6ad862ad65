import json
import re
import shutil

import torch
from safetensors.torch import load_file, save_file

from espalier.engine.models.hub import locate


def test_inspect_shows_what_a_pair_is_and_what_fits(espalier):
    shown = espalier("models", "inspect", "demo-generator", "demo-verifier", "--memory", "1G")
    assert shown.code == 0, shown.err
    text = " ".join(shown.out.split())
    for part in ("role generator", "verifier: token-classifier", "all tensors checked"):
        assert part in text
    assert "paths of 1,024 tokens" in text
    assert "▸⏎⏎◂" in text


def test_inspect_as_json_has_the_same_figures(espalier):
    shown = espalier("models", "inspect", "demo-verifier", "--dtype", "float32", "--memory", "1G", "--json")
    document = json.loads(shown.out)
    (found,) = document["checkpoints"]
    assert (found["role"], found["family"], found["kv_bytes_per_token"]) == ("verifier", "token-classifier", 8960)
    assert document["fit"]["paths"] == document["fit"]["kv_bytes"] // (1024 * 8960)


def test_inspect_shows_the_dtype_that_would_run_unless_a_flag_names_another(espalier, monkeypatch):
    def shown(*flags: str) -> tuple[str, int]:
        document = json.loads(espalier("models", "inspect", "demo-generator", "--json", *flags).out)
        (found,) = document["checkpoints"]
        return found["dtype"], found["kv_bytes_per_token"]

    assert shown("--device", "cpu") == ("float32", 3072)
    assert shown("--device", "cpu", "--dtype", "bfloat16") == ("bfloat16", 1536)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert shown() == ("bfloat16", 1536)


def test_swapped_roles_are_one_short_line_with_the_flags(espalier):
    shown = espalier("solve", "1+1?", "--generator", "demo-verifier", "--verifier", "demo-generator")
    assert shown.code != 0
    text = " ".join(shown.err.split())
    assert "--generator" in text
    assert "--verifier" in text
    assert len(text) < 500


def test_inspect_says_when_weights_do_not_fit(espalier):
    assert "do not fit in 1.00 MiB" in espalier("models", "inspect", "demo-generator", "--memory", "1M").out


def test_wrong_input_is_one_line(espalier):
    for arguments, message in (
        (("nothing-here",), "no checkpoint 'nothing-here'"),
        (("demo-generator", "--dtype", "float8"), "unknown dtype 'float8'"),
        (("demo-generator", "--memory", "much"), "is not a size"),
        (("demo-verifier", "--verifier-family", "unheard-of"), "'unheard-of' is none of"),
    ):
        shown = espalier("models", "inspect", *arguments)
        assert shown.code != 0
        assert message in " ".join(shown.err.split())


def test_a_base_model_is_warned_of_and_what_widens_weights_is_said(espalier, tmp_path, caplog):
    """A copy of the bundled generator in bfloat16, without its chat template."""
    source, folder = locate("demo-generator"), tmp_path / "base"
    shutil.copytree(source, folder)
    weights = {name: value.to(torch.bfloat16) for name, value in load_file(source / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    del tokenizer["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    ran = espalier("models", "inspect", folder, "--dtype", "float32")
    assert "has no chat template, as of a base model" in ran.out + ran.err
    assert re.search(r"in files .*most of it as \w+, which is widened as it loads to float32, 4 bytes each", ran.out), (
        ran.out
    )
    assert "in files" not in espalier("models", "inspect", folder, "--dtype", "bfloat16").out
    ran = espalier("solve", "-a", "greedy", "--max-tokens", 8, "--generator", folder, "What is 2+3?")
    assert ran.code == 0
    assert "has no chat template, as of a base model" in caplog.text
    caplog.clear()
    assert espalier("solve", "-a", "greedy", "--max-tokens", 8, "What is 2+3?").code == 0
    assert "no chat template" not in caplog.text
