"""Train the demo model, a tokenizer and a small Llama, on a CPU in an afternoon.

    pip install -e '.[cpu,train]' && python demo/train.py

The tokenizer is trained on a sample of the corpus. Then the model sees the corpus once, without
repetition, in batches of conversations of similar length, each beginning at position 0. Only the
assistant's tokens count in the loss. A checkpoint is written to `demo/run/` regularly, from which the
same command resumes, and the engine runs a small exam on it. Finally the model is saved to
`demo/model/` in float16.

The model is transformers' own Llama, saved by `save_pretrained`, so the result is an ordinary
checkpoint. Nothing else in this project needs torch.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import tokenizers
import torch
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import corpus

HERE = Path(__file__).resolve().parent
MODEL, RUN = HERE / "model", HERE / "run"

VOCABULARY = 1536
LENGTH = 1024  # maximum length of a conversation in tokens, and the model's context length
POOL = 1024  # number of conversations that are sorted by length together
START, SYSTEM, USER, ASSISTANT, END = (
    "<|start|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)

# Words with the preceding space, punctuation, single digits, and runs of spaces. So a number is always
# tokenized digit by digit.
PIECES = r" ?\p{L}+| ?\p{N}|'\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        {{- raise_exception("the roles are system, user and assistant, not " + message.role) }}
    {%- endif %}
    {{- "<|" + message.role + "|>" + message.content | trim + "<|end|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|assistant|>" }}
{%- endif %}
"""


# --- the tokenizer ------------------------------------------------------------------------------


def train_tokenizer() -> tokenizers.Tokenizer:
    """Train a byte-level BPE: it can encode any text, and frequent words become single tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True) for token in (START, SYSTEM, USER, ASSISTANT, END)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = itertools.islice(corpus.conversations("tokenizer"), 20_000)
    texts = (
        message["content"].replace(corpus.CUT, " ") for talk in sample for message in talk.messages
    )
    tokenizer.train_from_iterator(texts, trainer)
    start = tokenizer.token_to_id(START)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, start)]
    )
    return tokenizer


def save_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=START,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=LENGTH,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)


# --- batches ------------------------------------------------------------------------------------


class Encoder:
    """Encodes conversations as token ids, each with a flag: True for tokens that the model should generate."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self.tokenizer = tokenizer
        self.start, self.end = tokenizer.token_to_id(START), tokenizer.token_to_id(END)
        self.role = {
            role: tokenizer.token_to_id(f"<|{role}|>") for role in ("system", "user", "assistant")
        }

    def ids(self, text: str) -> list[int]:
        """Tokenize a text. It is split at `CUT` first, and each piece is tokenized separately."""
        pieces = self.tokenizer.encode_batch(text.split(corpus.CUT), add_special_tokens=False)
        return [id for piece in pieces for id in piece.ids]

    def encode(self, talk: corpus.TrainingText) -> list[tuple[int, bool]]:
        tokens = [(self.start, False)]
        # Without a template: the question, if there is one, then the answer on its own line
        if talk.plain:
            *asked, answer = (message["content"] for message in talk.messages)
            tokens += [(id, False) for text in asked for id in self.ids(text)]
            tokens += [(id, True) for id in self.ids("\n" + answer if asked else answer)]
            return [*tokens, (self.end, True)]
        for message in talk.messages:
            said = message["role"] == "assistant"
            tokens.append((self.role[message["role"]], False))
            tokens += [(id, said) for id in self.ids(message["content"])]
            tokens.append((self.end, said))
        return tokens


def pools(encoder: Encoder, batch_tokens: int, first: int) -> Iterator[tuple[int, list[list]]]:
    """Yield the pools from number `first` on, each as a list of batches. Rows of a batch have similar
    lengths, so there is little padding."""
    for n in itertools.count(first):
        talks = itertools.islice(corpus.conversations(f"pool {n}"), POOL)
        rows = sorted((row for row in map(encoder.encode, talks) if len(row) <= LENGTH), key=len)
        batches, batch = [], []
        for row in rows:
            if batch and len(row) * (len(batch) + 1) > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(row)
        batches.append(batch)
        random.Random(n).shuffle(batches)
        yield n, batches


def tensors(batch: list[list[tuple[int, bool]]], end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids, labels), both (B, L), padded on the right. The loss ignores labels of -100."""
    L = max(map(len, batch))
    ids = torch.tensor([[id for id, _ in row] + [end] * (L - len(row)) for row in batch])
    labels = torch.tensor(
        [[id if said else -100 for id, said in row] + [-100] * (L - len(row)) for row in batch]
    )
    return ids, labels


# --- training -----------------------------------------------------------------------------------


def make_model(encoder: Encoder, vocabulary: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=encoder.start,
        eos_token_id=encoder.end,
        pad_token_id=encoder.end,
    )
    return LlamaForCausalLM(config)


def start_from(folder: Path) -> tuple[LlamaForCausalLM, tokenizers.Tokenizer]:
    """Load a trained model and its tokenizer."""
    model = LlamaForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).train()
    return model, tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@torch.no_grad()
def mix_in(model: LlamaForCausalLM, folder: Path, share: float) -> None:
    """Average the weights with those before a second run, with weight `share`, so that the model forgets
    less of the first run."""
    before = LlamaForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    for now, then in zip(model.parameters(), before.parameters(), strict=True):
        now.lerp_(then, share)


def precision():
    """Return a context that uses bfloat16 if the processor supports it in hardware, where it is twice as
    fast."""
    cpu = Path("/proc/cpuinfo")
    fast = cpu.exists() and " avx512bw " in cpu.read_text()
    return torch.autocast("cpu", torch.bfloat16, enabled=fast)


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=True)


def rate(seen: int, total: int, peak: float) -> float:
    """Return the learning rate: a warm-up over the first 1 %, then a cosine decay to 2 % of the peak."""
    done = min(seen / total, 1.0)
    if done < 0.01:
        return peak * (done / 0.01 + 0.01)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (done - 0.01) / 0.99)))


def save_model(model: LlamaForCausalLM, tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """Save the model in float16: half the size, and more precise than bfloat16 for weights in this range."""
    folder.mkdir(parents=True, exist_ok=True)
    half = LlamaForCausalLM(model.config)
    half.load_state_dict(model.state_dict())
    half = half.to(torch.float16)
    half.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        do_sample=False,
    )
    half.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory. It returns each large tensor to the kernel, and clearing the same
    pages again takes half of the training time."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        trim_threshold, mmap_threshold = -1, -3
        libc.mallopt(mmap_threshold, 32 << 20)  # glibc's maximum
        libc.mallopt(trim_threshold, 2**31 - 1)


class TrainingLog:
    """Prints readable lines, and appends the same figures as JSON to a file."""

    def __init__(self, path: Path):
        self.path = path

    def __call__(self, **figures) -> None:
        print("  ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
        with self.path.open("a") as file:
            file.write(json.dumps(figures) + "\n")


def exam(folder: Path) -> dict[str, float]:
    """Run `eval.py` in a separate process, and return its scores."""
    command = [
        sys.executable,
        str(HERE / "eval.py"),
        "--model",
        str(folder),
        "--prompts",
        "24",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"exam failed": done.stderr.strip()[-200:]}
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description="Train the demo model. Run it again to resume after an interruption.",
    )
    parser.add_argument(
        "--tokens", type=float, default=45e6, help="tokens to train on (default 45e6)"
    )
    parser.add_argument("--batch", type=int, default=4096, help="tokens in a batch (default 4096)")
    parser.add_argument(
        "--rate", type=float, default=2.5e-3, help="the highest learning rate (default 2.5e-3)"
    )
    parser.add_argument(
        "--start",
        type=Path,
        help="continue from the model in this folder, with another --rate or corpus",
    )
    parser.add_argument(
        "--keep",
        type=float,
        default=0,
        help="with --start: share of its weights to mix in at the end (default 0)",
    )
    parser.add_argument(
        "--exam", type=float, default=8e6, help="tokens between two small exams (default 8e6)"
    )
    args = parser.parse_args()

    keep_freed_memory()
    RUN.mkdir(exist_ok=True)
    log = TrainingLog(RUN / "log.jsonl")
    torch.manual_seed(0)
    if args.start:
        model, tokenizer = start_from(args.start)
        encoder = Encoder(tokenizer)
    else:
        path = RUN / "tokenizer.json"
        if not path.exists():
            train_tokenizer().save(str(path))
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        encoder = Encoder(tokenizer)
        model = make_model(encoder, tokenizer.get_vocab_size())
    optimizer = make_optimizer(model)
    state = {"pool": 0, "tokens": 0, "examined": 0, "seconds": 0.0}
    checkpoint = RUN / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state = saved["state"]
    size = sum(p.numel() for p in model.parameters())
    options = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()
    }
    log(
        parameters=size,
        vocabulary=tokenizer.get_vocab_size(),
        goes_on_at=state["tokens"],
        **options,
    )

    for n, batches in pools(encoder, args.batch, state["pool"]):
        losses, began, here = [], time.monotonic(), 0
        for batch in batches:
            for group in optimizer.param_groups:
                group["lr"] = rate(state["tokens"], args.tokens, args.rate)
            ids, labels = tensors(batch, encoder.end)
            with precision():
                loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            here += sum(map(len, batch))
            state["tokens"] += sum(map(len, batch))
        state["pool"], seconds = n + 1, time.monotonic() - began
        state["seconds"] += seconds
        left = max(args.tokens - state["tokens"], 0)
        log(
            pool=n,
            tokens=f"{state['tokens'] / 1e6:.2f}M",
            loss=round(sum(losses) / len(losses), 4),
            rate=float(f"{optimizer.param_groups[0]['lr']:.2e}"),
            tokens_per_s=round(here / seconds),
            minutes=round(state["seconds"] / 60, 1),
            minutes_left=round(left / here * seconds / 60),
        )
        finished = state["tokens"] >= args.tokens
        due = state["tokens"] - state["examined"] >= args.exam
        if n % 10 == 9 or due or finished:
            if due:
                state["examined"] = state["tokens"]
            saved = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "state": state,
            }
            torch.save(saved, checkpoint.with_suffix(".new"))
            # Atomic, so that there is always a complete checkpoint
            checkpoint.with_suffix(".new").rename(checkpoint)
        if finished:
            if args.start and args.keep:
                mix_in(model, args.start, args.keep)
            save_model(model, tokenizer, MODEL)
            log(saved=str(MODEL.relative_to(HERE.parent)), minutes=round(state["seconds"] / 60, 1))
            break
        if due:
            save_model(model, tokenizer, RUN / "model")
            log(exam=exam(RUN / "model"))


if __name__ == "__main__":
    main()
