"""Conversations by the chat template of a Hugging Face tokenizer, learnt where the assistant speaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.chats import IGNORE, write_rows
from tokenizers import Tokenizer, models, pre_tokenizers

import binidx
from binidx.dataset.assemble.chat import ChatTokenizer
from binidx.dataset.megatron.sft import SFTDataset
from binidx.errors import ConfigError

TURNS = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
CHATML = TURNS + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|end|>{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
)
LAST_ONLY = "{{ messages | length }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<eos>", "<pad>"]
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "so"},
]


def hugging_face(template: str | None, **tokens: str) -> Any:
    pytest.importorskip("transformers")
    from transformers import PreTrainedTokenizerFast

    letters = [chr(each) for each in range(32, 127)]
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, "<unk>", *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=SPECIAL[:4], chat_template=template, **tokens
    )
    made.name_or_path = "letters"
    return made


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["turn by turn", "marked"])
def test_answers_are_trained_on_with_the_end_of_their_turn(template: str) -> None:
    chat = ChatTokenizer(hugging_face(template, eos_token="<eos>", pad_token="<pad>"))
    tokens, targets = chat.tokenize_conversation(CHAT, return_target=True, add_generation_prompt=False)
    text = chat.tokenizer.decode(tokens).replace(" ", "")
    assert (
        text
        == "<|system|>bebrief<|end|><|user|>hi<|end|><|assistant|>hello<|end|><|user|>why<|end|><|assistant|>so<|end|>"
    )
    learnt = chat.tokenizer.decode(tokens[targets != IGNORE]).replace(" ", "")
    assert learnt == "hello<|end|>so<|end|>"
    np.testing.assert_array_equal(targets[targets != IGNORE], tokens[targets != IGNORE])
    np.testing.assert_array_equal(chat.tokenize_conversation(CHAT, False, False), tokens)


def test_samples_are_made_with_it_and_know_its_name(tmp_path: Path) -> None:
    chat = ChatTokenizer(hugging_face(CHATML, eos_token="<eos>", pad_token="<pad>"))
    config = binidx.GPTDatasetConfig(
        random_seed=1, sequence_length=64, split="1,0,0", tokenizer=chat, reset_position_ids=False,
        blend=([write_rows(f"{tmp_path}/a.jsonl", [{"messages": CHAT}, {"text": "plain"}])], None),
        reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    dataset = binidx.BlendedMegatronDatasetBuilder(SFTDataset, [2, 0, 0], lambda: True, config).build()[0]
    assert isinstance(dataset, SFTDataset)
    assert '"tokenizer_path": [\n            "letters"' in dataset.unique_description
    for idx, needed in enumerate(["hello<|end|>so<|end|>", "lain<eos>"]):
        sample = dataset[idx]
        learnt = sample["labels"][sample["loss_mask"] == 1]
        assert chat.tokenizer.decode(learnt).replace(" ", "") == needed
    assert config.token_dtype_code == 8


def test_tokenizers_that_cannot_chat_are_refused() -> None:
    with pytest.raises(ConfigError, match="letters: has no chat template"):
        ChatTokenizer(hugging_face(None, eos_token="<eos>"))
    nameless = hugging_face(None, eos_token="<eos>")
    nameless.name_or_path = ""
    with pytest.raises(ConfigError, match=f"{type(nameless).__name__}: has no chat template"):
        ChatTokenizer(nameless)
    with pytest.raises(ConfigError, match="letters: has no eos_token"):
        ChatTokenizer(hugging_face(CHATML))
    counting = ChatTokenizer(hugging_face(LAST_ONLY, eos_token="<eos>"))
    with pytest.raises(
        ConfigError, match=r"does not begin with the tokens of its first 2 turns; mark .* {% generation %}"
    ):
        counting.tokenize_conversation(CHAT, True, False)
