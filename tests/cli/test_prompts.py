"""Prompts from everywhere; what is wrong is named with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from kvxfer.cli.prompts import Prompt, built_in_prompts, load_prompts, text_decoder, text_encoder
from kvxfer.errors import ConfigError


def load(path: Path, text: str) -> list[Prompt]:
    path.write_text(text, encoding="utf-8")
    return load_prompts(path, encode=text_encoder(None), vocab_size=256, max_new_tokens=4)


def test_built_in_prompts() -> None:
    prompts = built_in_prompts(2048, 32)
    assert [len(prompt.token_ids) for prompt in prompts] == [
        *(5, 300, 16, 32, 33, 128, 150, 777, 420, 128),
    ]
    by_name = {prompt.name: prompt.token_ids for prompt in prompts}
    assert by_name["shared-a"][:270] == by_name["shared-b"][:270]
    assert by_name["shared-a"][270] != by_name["shared-b"][270]
    assert by_name["repeated"] == by_name["again"]
    assert len({tuple(ids[:5]) for ids in by_name.values()}) == 7
    assert prompts == built_in_prompts(2048, 32)
    small = built_in_prompts(11, 1)
    assert {token for prompt in small for token in prompt.token_ids} == set(range(11))
    assert {prompt.max_new_tokens for prompt in small} == {1}


def test_jsonl(tmp_path: Path) -> None:
    text = '{"prompt_token_ids": [1, 2, 255]}\n\n{"prompt": "hé"}\n'
    assert load(tmp_path / "p.jsonl", text) == [
        Prompt("line 1", (1, 2, 255), 4),
        Prompt("line 3", (104, 195, 169), 4),
    ]


def test_plain_text_has_one_prompt_a_line(tmp_path: Path) -> None:
    assert load(tmp_path / "p.txt", "ab\n\n{c}\n") == [
        Prompt("line 1", (97, 98), 4),
        Prompt("line 3", (123, 99, 125), 4),
    ]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", r"p.jsonl:2: Input data was truncated"),
        ("[1]", r"p.jsonl:2: Expected `object`, got `array`"),
        ('{"prompt": 3}', r"p.jsonl:2: Expected `str \| null`, got `int` - at `\$.prompt`"),
        ('{"promt": "a"}', r"p.jsonl:2: Object contains unknown field `promt`"),
        ("{}", r'p.jsonl:2: expected either "prompt" or "prompt_token_ids", got both or none'),
        ('{"prompt": "a", "prompt_token_ids": [1]}', r"p.jsonl:2: expected either"),
        ('{"prompt_token_ids": []}', r"p.jsonl:2: expected at least one token, got none"),
        ('{"prompt": ""}', r"p.jsonl:2: expected at least one token, got none"),
        ('{"prompt_token_ids": [1, 256]}', r"p.jsonl:2: expected token ids in \[0, 256\), got 256"),
        ('{"prompt_token_ids": [-1]}', r"p.jsonl:2: expected token ids in \[0, 256\), got -1"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, line: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(tmp_path / "p.jsonl", f'{{"prompt": "fine"}}\n{line}\n')


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected at least one prompt, got an empty file"):
        load(tmp_path / "p.txt", "\n \n")
    with pytest.raises(ConfigError, match=r"--prompts: .*none.txt cannot be read \(No such file"):
        load_prompts(
            tmp_path / "none.txt", encode=text_encoder(None), vocab_size=1, max_new_tokens=1
        )
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(ConfigError, match=r"latin.txt cannot be read \(not UTF-8\)"):
        load_prompts(
            tmp_path / "latin.txt", encode=text_encoder(None), vocab_size=1, max_new_tokens=1
        )


def test_text_is_read_by_the_models_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="c"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert list(text_encoder(str(tmp_path))("b a x")) == [1, 0, 2]
    decode = text_decoder(str(tmp_path))
    assert decode is not None
    assert decode((1, 0, 2)) == "b a c"
    # a bare config file, or a folder without one: UTF-8 bytes
    assert list(text_encoder(str(tmp_path / "config.json"))("b")) == [98]
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer.json: "):
        text_encoder(str(tmp_path))
    for model in (None, str(tmp_path / "config.json"), "hybrid"):
        assert text_decoder(model) is None
