"""Prompts in, answers out: the plain command line."""

from __future__ import annotations

import argparse
import os
import sys

from nanobatch import Engine, Handle, QueueFull, Sampling
from parts.text import printable


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("ask.py", description="Run prompts through a Llama model, all at once.")
    add = parser.add_argument
    add("--model", default="demo", help="a model folder, a hub id such as owner/name, or 'demo'")
    add("--prompt", action="append", help="what to answer; may be repeated; - reads standard input")
    add("--raw", action="store_true", help="take prompts as plain text, even if the model has a chat template")
    add("--max-tokens", type=int, help="longest answer in tokens (default: to the end of the slot)")
    add("--slots", type=int, help="sequences that run at once (default: one for each prompt, up to 8)")
    add("--max-len", type=int, help="length of a slot, prompt and answer together (default: 1024, or what fits)")
    add("--policy", default="continuous", help="continuous, static or serial")
    add("--compact", action="store_true", help="leave idle rows out: faster, equal tokens, other bits")
    add("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    add("--top-p", type=float, default=1.0, help="keep the likeliest tokens that reach this probability together")
    add("--top-k", type=int, default=0, help="keep the k likeliest tokens")
    add("--min-p", type=float, default=0.0, help="keep tokens at least this fraction as likely as the likeliest")
    add("--repetition-penalty", type=float, default=1.0, help="above 1, recent tokens become less likely")
    add("--seed", type=int, help="the same seed gives the same tokens")
    add("--stop", action="append", default=[], help="a text that ends the answer; may be repeated")
    add("--ignore-eos", action="store_true", help="go on after the model's end token")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Stream the answers in the prompts' order, while all of them run. 2 if the input was at fault."""
    args = parse_arguments(arguments)
    handles: list[Handle] = []
    if sys.stdin is None:  # closed by the caller: then the first file to be opened would pass for standard input
        os.open(os.devnull, os.O_RDONLY)
    try:
        stdin = sys.stdin.read() if sys.stdin and "-" in (args.prompt or ["-"]) else ""
        prompts = [stdin if prompt == "-" else prompt for prompt in args.prompt or ["-"]]
        slots = min(len(prompts), 8) if args.slots is None else args.slots
        settings = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")
        sampling = Sampling(**{name: getattr(args, name) for name in settings}, ignore_eos=args.ignore_eos)
        options = {"slots": slots, "max_len": args.max_len, "policy": args.policy, "exact": not args.compact}
        with Engine.load(args.model, **options) as engine:
            chat = engine.text.has_template and not args.raw
            for prompt in prompts:
                asked = [{"role": "user", "content": prompt}] if chat and prompt else prompt
                handles.append(engine.submit(asked, sampling))
            print(f"nanobatch: {engine.summary}", file=sys.stderr)
            if not engine.text.has_template and not args.raw:
                print("nanobatch: this model has no chat template; prompts are taken as plain text", file=sys.stderr)
            with engine.serving():
                for handle, prompt in zip(handles, prompts, strict=True):
                    show(handle, prompt)
    except (ValueError, QueueFull, UnicodeDecodeError) as error:
        print(f"nanobatch: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        sys.stdout = None  # so that Python does not try to flush it at exit
        return 141
    except OSError as error:  # a full disk
        sys.stdout = None
        print(f"nanobatch: the answer cannot be written: {error}", file=sys.stderr)
        return 1
    return 1 if any(handle.finish_reason == "error" for handle in handles) else 0


def show(handle: Handle, prompt: str) -> None:
    """One answer as it comes, and one line of figures under it."""
    print(f"--- {handle.id + 1}: {printable(' '.join(prompt.split()))[:100]}")
    for piece in handle:
        print(printable(piece), end="", flush=True)
    result = handle.result()
    m = result.metrics
    ttft = "-" if m.ttft_s is None else f"{m.ttft_s * 1000:.0f} ms"
    rate = "-" if m.tokens_per_s is None else f"{m.tokens_per_s:.0f} tokens/s"
    print(f"\n    [{result.finish_reason}: {m.output_tokens} tokens, TTFT {ttft}, {rate}]", flush=True)
    if result.error:
        print(f"nanobatch: request {handle.id + 1}: {printable(result.error)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
