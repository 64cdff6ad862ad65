"""Properties of the text of every file in the checkout."""

import re

from house_files import ROOT, checkout

# Built from parts, so that this file does not hold what it looks for; a test may make up `someone`.
_TOPS = "|".join(["work", "root", "home(?!/someone/)", "Users", "mnt"])
MACHINE_PATH = re.compile(rf"(?<![\w.:/~*-])/(?:{_TOPS})/\w")


def texts() -> dict[str, str]:
    """Every file that is UTF-8 text, by name."""
    found = {}
    for name in checkout():
        try:
            found[name] = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return found


def test_no_file_names_a_path_of_somebodys_machine():
    found = {name: match.group() for name, text in texts().items() if (match := MACHINE_PATH.search(text))}
    assert found == {}


def test_the_search_for_machine_paths_can_find_one():
    assert MACHINE_PATH.search('open("/' + "home/ann/x.txt" + '")')
    assert not MACHINE_PATH.search("see https://example.org/home/page and src/work/x")


def test_docstrings_begin_with_what_a_thing_is_or_does():
    """One that opens with a question word says it around a corner."""
    opening = re.compile(r'^\s*"""(?:What|Which|How|Who|Whose|Where|Whether|When)\b.*', re.MULTILINE)
    product = ("kernels/", "engine/", "prm/", "search/", "experiments/", "examples/")
    sources = {name: text for name, text in texts().items() if name.startswith(product) and name.endswith(".py")}
    assert {name: opening.findall(text) for name, text in sources.items() if opening.search(text)} == {}
    assert opening.search('    """What stands here."""')
