"""Writes the suites that are made by a rule: `python -m benchmarks.make_suites` (llm, odd, unseen).

A test compares the files with what this writes; to change a suite, change the rule here and run it.
"""

from __future__ import annotations

import math
import random
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SUITES = Path(__file__).parent / "suites"
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
UNSEEN_SEED = 20251129
UNSEEN_COUNT = 300
UNSEEN_EXTENTS = (16, 16384)
# Operands of one problem: several rotating sets of them have to fit on a GPU.
UNSEEN_MAX_BYTES = 2 * 2**30

Layers = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Model:
    """An open model's linear layers: [N, K] of each weight by what it does, and where the sizes are from."""

    name: str
    source: str
    layers: Layers


def decoder(*, hidden: int, feed_forward: int, heads: int, kv_heads: int, head: int) -> Layers:
    """Layers of a decoder block as servers fuse them: q, k and v in one product, gate and up in one."""
    return {
        "qkv": ((heads + 2 * kv_heads) * head, hidden),
        "attention out": (hidden, heads * head),
        "gate and up": (2 * feed_forward, hidden),
        "down": (hidden, feed_forward),
    }


# Sizes are hidden_size, intermediate_size, num_attention_heads, num_key_value_heads and head_dim of the
# config.json named. None of those files could be opened from where this was written, so each was read in a
# published copy: LITGPT is litgpt/config.py of Lightning-AI/litgpt, commit 26857050, which names the file it
# follows. A number that was doubtful says so.
LITGPT = "config.json, as in litgpt/config.py (26857050)"
MODELS = (
    Model(
        "Llama 3 8B",
        f"meta-llama/Meta-Llama-3-8B {LITGPT}",
        decoder(hidden=4096, feed_forward=14336, heads=32, kv_heads=8, head=128),
    ),
    Model(
        "Llama 3 70B",
        f"meta-llama/Meta-Llama-3-70B {LITGPT}",
        decoder(hidden=8192, feed_forward=28672, heads=64, kv_heads=8, head=128),
    ),
    Model(
        "Llama 3.1 405B",
        f"meta-llama/Meta-Llama-3.1-405B {LITGPT}. Not confirmed: 8 key-value heads; other copies of that "
        "file are said to have had 16",
        decoder(hidden=16384, feed_forward=53248, heads=128, kv_heads=8, head=128),
    ),
    Model(
        "Qwen 2.5 7B",
        f"Qwen/Qwen2.5-7B {LITGPT}",
        decoder(hidden=3584, feed_forward=18944, heads=28, kv_heads=4, head=128),
    ),
    Model(
        "Qwen 2.5 72B",
        f"Qwen/Qwen2.5-72B {LITGPT}",
        decoder(hidden=8192, feed_forward=29568, heads=64, kv_heads=8, head=128),
    ),
    Model(
        "Qwen 3 32B",
        f"Qwen/Qwen3-32B {LITGPT}",
        decoder(hidden=5120, feed_forward=25600, heads=64, kv_heads=8, head=128),
    ),
    Model(
        "Qwen 3 30B-A3B",
        f"Qwen/Qwen3-30B-A3B {LITGPT}",
        {
            "qkv": ((32 + 2 * 4) * 128, 2048),
            "attention out": (2048, 32 * 128),
            "router": (128, 2048),
            "expert gate and up": (2 * 768, 2048),
            "expert down": (2048, 768),
        },
    ),
    Model(
        "Mistral 7B and the experts of Mixtral 8x7B",
        f"mistralai/Mistral-7B-v0.3 and Mixtral-8x7B-v0.1 {LITGPT}",
        decoder(hidden=4096, feed_forward=14336, heads=32, kv_heads=8, head=128),
    ),
    Model(
        "Mixtral 8x22B",
        f"mistralai/Mixtral-8x22B-v0.1 {LITGPT}",
        {
            **decoder(hidden=6144, feed_forward=16384, heads=48, kv_heads=8, head=128),
            "router": (8, 6144),
        },
    ),
    Model(
        "DeepSeek V3",
        "deepseek-ai/DeepSeek-V3 config.json, as in the defaults of DeepseekV3Config (transformers, "
        "configuration_deepseek_v3.py, 001f85b3); copies of its inference/configs/config_671B.json agree",
        {
            "query down and latent": (1536 + 512 + 64, 7168),
            "query up": (128 * (128 + 64), 1536),
            "key and value up": (128 * (128 + 128), 512),
            "attention out": (7168, 128 * 128),
            "dense gate and up": (2 * 18432, 7168),
            "dense down": (7168, 18432),
            "router": (256, 7168),
            "expert gate and up": (2 * 2048, 7168),
            "expert down": (7168, 2048),
        },
    ),
    Model(
        "Gemma 3 27B",
        f"google/gemma-3-27b-it {LITGPT}",
        decoder(hidden=5376, feed_forward=21504, heads=32, kv_heads=16, head=128),
    ),
    Model(
        "GPT-OSS 120B",
        "openai/gpt-oss, the defaults of ModelConfig in gpt_oss/torch/model.py (0568dfc9)",
        {
            "qkv": ((64 + 2 * 8) * 64, 2880),
            "attention out": (2880, 64 * 64),
            "router": (128, 2880),
            "expert gate and up": (2 * 2880, 2880),
            "expert down": (2880, 2880),
        },
    ),
    Model(
        "SmolLM2 135M",
        f"HuggingFaceTB/SmolLM2-135M {LITGPT}",
        decoder(hidden=576, feed_forward=1536, heads=9, kv_heads=3, head=64),
    ),
    Model(
        "SmolLM2 1.7B",
        f"HuggingFaceTB/SmolLM2-1.7B {LITGPT}",
        decoder(hidden=2048, feed_forward=8192, heads=32, kv_heads=32, head=64),
    ),
)

PRIMES = [7, 31, 61, 127, 251, 509, 1021, 2039, 3001, 4093, 5281, 8191]
OFFSETS = ((1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1), (1, 1, 1), (-1, -1, -1))


def main() -> int:
    """Write every suite this makes and say which."""
    for name, text in suites().items():
        path = SUITES / name
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


def suites() -> dict[str, str]:
    """Return file name -> text."""
    return {"llm.toml": llm(), "odd.toml": odd(), "unseen.toml": unseen()}


def llm() -> str:
    """Every layer of every model at every count of tokens; a shape that two models share is written once."""
    lines = [
        *comment(
            "Linear layers of open language models at M = 1 to 8192 tokens. A weight is [N, K] and is used "
            "through its transpose (nt); q, k and v are one product, and so are gate and up, as servers fuse "
            "them. The output embedding is left out: servers need it for one token of a sequence. Made by "
            "`python -m benchmarks.make_suites`; a layer that an earlier model has is named, not repeated.",
            indent="",
        ),
        'name = "llm"',
        'origin = "layer sizes from the published configurations named beside each model"',
        'layout = "nt"',
        'dtype = "bf16"',
        "problems = [",
    ]
    seen: dict[tuple[int, int], str] = {}
    for model in MODELS:
        lines += comment(f"{model.name}: {model.source}.")
        for layer, (n, k) in model.layers.items():
            known = seen.get((n, k))
            lines += comment(f"{layer}: N {n}, K {k}" + (f", as {known}" if known else ""))
            if known is None:
                seen[n, k] = f"{model.name}, {layer}"
                lines += wrapped(f"{m}x{n}x{k}" for m in TOKENS)
    return "\n".join([*lines, "]", ""])


def odd() -> str:
    """Shapes that tiles and 16-byte rows do not fit: primes, no multiples of 8, one off a tile."""
    turned = (PRIMES[at:] + PRIMES[:at] for at in (0, 3, 5))
    measured = [(426, 3159, 573), (1691, 1101, 5281), (2462, 543, 3270)]
    uneven = [(m, n, k) for m in (100, 1000, 4004) for n in (250, 1500, 5002) for k in (300, 1026, 3333)]
    beside = [(4 * tile + dm, 8 * tile + dn, 1024 + dk) for tile in (64, 128, 256) for dm, dn, dk in OFFSETS]
    groups = (
        ("primes on every axis", list(zip(*turned, strict=True))),
        ("cuBLAS 13.1 takes 6 to 15 times the floor of bytes and FLOPs here (H200)", measured),
        ("N or K or both no multiple of 8, small to large", [s for s in uneven if s[1] % 8 or s[2] % 8]),
        ("one off a multiple of a tile of 64, 128 or 256, on each axis and on all", beside),
    )
    lines = [
        *comment(
            "Shapes that tiles, 16-byte rows and tensor maps do not fit. Choose layouts and dtypes with "
            "--layout and --dtype. Made by `python -m benchmarks.make_suites`.",
            indent="",
        ),
        'name = "odd"',
        'origin = "primes; N or K no multiple of 8; one more or one less than a multiple of a tile"',
        "problems = [",
    ]
    for why, shapes in groups:
        lines += comment(why)
        lines += wrapped(f"{m}x{n}x{k}" for m, n, k in shapes)
    return "\n".join([*lines, "]", ""])


def unseen() -> str:
    """Random shapes that no search was given: logarithmically uniform, every other one a multiple of 8."""
    generator = random.Random(UNSEEN_SEED)
    low, high = (math.log(extent) for extent in UNSEEN_EXTENTS)
    shapes: list[str] = []
    while len(shapes) < UNSEEN_COUNT:
        m, n, k = (round(math.exp(generator.uniform(low, high))) for _ in range(3))
        if len(shapes) % 2 == 0:
            n, k = (8 * round(extent / 8) for extent in (n, k))
        layout = generator.choice(("nn", "nt"))
        dtype = generator.choice(("fp16", "bf16"))
        text = f"{m}x{n}x{k}:{layout}:{dtype}"
        if 2 * (m * k + k * n + m * n) <= UNSEEN_MAX_BYTES and text not in shapes:
            shapes.append(text)
    lines = [
        *comment(
            "Random shapes to see how dispatch does on what was never tuned: never give them to a search. "
            f"M, N and K are logarithmically uniform in {UNSEEN_EXTENTS[0]}..{UNSEEN_EXTENTS[1]}, N and K of "
            "every other shape rounded to multiples of 8; layout nn or nt, dtype fp16 or bf16; at most 2 GiB "
            "of operands. Made by `python -m benchmarks.make_suites`; the rule is `unseen` there.",
            indent="",
        ),
        'name = "unseen"',
        f'origin = "{UNSEEN_COUNT} random shapes, seed {UNSEEN_SEED}, by benchmarks/make_suites.py"',
        "problems = [",
        *wrapped(shapes),
    ]
    return "\n".join([*lines, "]", ""])


def comment(text: str, indent: str = "    ") -> list[str]:
    """Return a comment as the lines it takes."""
    return [f"{indent}# {line}" for line in textwrap.wrap(text, 102, break_on_hyphens=False)]


def wrapped(texts: Iterable[str]) -> list[str]:
    """Return the lines of a list's items, none longer than the code's."""
    items = " ".join(f'"{text}",' for text in texts)
    return [f"    {line}" for line in textwrap.wrap(items, 104, break_on_hyphens=False)]


if __name__ == "__main__":
    raise SystemExit(main())
