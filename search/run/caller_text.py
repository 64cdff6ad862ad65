"""The texts of callers in prompts: what looks like a token in them is text, for templates and tokenizers."""

import re

from espalier.engine.models.tokenizer import TextTokenizer

_BEGIN, _END = "\ue000", "\ue001"
_PLACE = re.compile(f"{_BEGIN}(\\d+){_END}")


class CallerText:
    """Hides tokens in the texts of callers while a prompt is rendered, and encodes them as ordinary text."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        hidden = tokenizer.control_tokens | {_BEGIN, _END}
        self._hidden = re.compile("|".join(map(re.escape, sorted(hidden, key=len, reverse=True))))

    def protect(self, text: str, tags: list[str]) -> tuple[str, list[str]]:
        """Return a text with a place for each token in it, which is added to `tags`."""

        def place(found: re.Match[str]) -> str:
            tags.append(found[0])
            return f"{_BEGIN}{len(tags) - 1}{_END}"

        return self._hidden.sub(place, text), tags

    def encode(self, prompt: str, tags: list[str]) -> list[int]:
        """Return the token ids of a rendered prompt, with the text of the `tags` at their places."""
        if not tags:
            return self._tokenizer.encode(prompt)
        ids: list[int] = []
        for i, part in enumerate(_PLACE.split(prompt)):
            ids += self._plain(tags[int(part)]) if i % 2 else self._tokenizer.encode(part)
        return ids

    def _plain(self, text: str) -> list[int]:
        """Token ids of a text without any added token: each is encoded in two parts."""
        ids: list[int] = []
        while found := self._hidden.search(text):
            ids += self._tokenizer.encode(text[: found.start() + 1])
            text = text[found.start() + 1 :]
        return ids + self._tokenizer.encode(text)
