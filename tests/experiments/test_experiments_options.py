import pytest
import typer

from espalier.experiments.options import parse_bytes, parse_int_list


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("512", 512),
        ("1K", 1024),
        ("512M", 512 * 2**20),
        ("4G", 4 * 2**30),
        ("1T", 2**40),
        ("1.5GiB", 3 * 2**29),
        ("2GB", 2**31),
        ("2gb", 2**31),
        ("10 MiB", 10 * 2**20),
        (" 7k ", 7 * 1024),
    ],
)
def test_sizes_are_in_powers_of_1024(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "lots", "G", "-1G", "1P", "1,5G", "0x10", "1e9", "4 G B", "1GG", "nan", "inf"])
def test_anything_else_is_not_a_size_and_the_error_shows_how_to_write_one(text):
    with pytest.raises(typer.BadParameter, match=r"write 512M or 4G") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(("text", "numbers"), [("1", [1]), ("1,2,4", [1, 2, 4]), (" 4 , 1 ", [4, 1])])
def test_lists_of_numbers_keep_their_order(text, numbers):
    assert parse_int_list(text) == numbers


@pytest.mark.parametrize("text", ["", ",", "1,", "0", "-1", "1,0", "1,1", "a", "1;2", "1.5", "1 2"])
def test_anything_else_is_not_a_list_of_different_positive_numbers(text):
    with pytest.raises(typer.BadParameter, match=r"write 1,2,4") as caught:
        parse_int_list(text)
    assert repr(text) in str(caught.value)


def test_a_server_does_not_go_down_with_a_difference(espalier):
    refused = espalier("serve", "--port", 0, "--verify-incremental")
    assert refused.code == 2
    assert "check with solve or eval" in " ".join(refused.err.replace("│", " ").split())


def test_help_names_the_extra_that_quantised_weights_need(espalier):
    assert "espalier[quantization]" in espalier("solve", "--help").out
