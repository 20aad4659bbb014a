"""Stage 12, for real: two processes share the demo model, over MLX's ring on 127.0.0.1.

python course/run.py mine course/from_zero/two_ranks.py "What is 17 + 6?"
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import traceback
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

if not sys.flags.safe_path:  # started directly, on our chapter
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

PATIENCE_S = 30
LOOPBACK = "127.0.0.1"


def be_a_rank(prompt: str) -> dict:
    """Run one rank. Return its tokens, the messages that it sent, and the size of its weights."""
    from course.from_zero import small_llama
    from course.from_zero.reference import ranks
    from kernels.device import mx

    ring = mx.distributed.init(backend="ring", strict=True)
    rank, size = ring.rank(), ring.size()
    layers = []
    for layer in range(small_llama.LAYERS):
        whole = small_llama.weights_of(layer)
        layers.append({name: ranks.shard(name, w, rank, size) for name, w in whole.items()})
    sent = []

    def all_sum(part: mx.array) -> mx.array:
        sent.append(part.nbytes)
        return mx.distributed.all_sum(part)

    own = partial(ranks.block, all_sum=all_sum)
    step = partial(small_llama.forward, block=own, weights_of=layers.__getitem__)
    said = small_llama.answer(small_llama.tokenizer().ask(prompt), step)
    held = sum(w.nbytes for layer in layers for w in layer.values())
    return {"tokens": said, "messages": len(sent), "bytes": sent[-1], "weights": held}


def launch(prompt: str, size: int = 2) -> list[dict]:
    """Start the ranks, and return their results. If one fails, all are killed."""
    with ExitStack() as at_last:
        folder = at_last.enter_context(TemporaryDirectory())
        sockets = [at_last.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(size)]
        hosts = [[f"{LOOPBACK}:{each.getsockname()[1]}"] for each in sockets]
        for each in sockets:
            each.close()
        hostfile = Path(folder, "hosts.json")
        hostfile.write_text(json.dumps(hosts))
        ranks = []
        for rank in range(size):
            environment = {**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile)}
            command = [sys.executable, __file__, prompt]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            ranks.append(subprocess.Popen(command, env=environment, **pipes))
            at_last.callback(ranks[-1].kill)
        said = []
        try:
            said = [each.communicate(timeout=PATIENCE_S) for each in ranks]
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"no end after {PATIENCE_S} s: does each rank call every sum?"
            ) from None
        failed = [(n, *said[n][1].splitlines()[-1:]) for n in range(size) if ranks[n].returncode]
        for number, *why in sorted(failed, key=lambda each: "[ring]" in str(each)):
            raise RuntimeError(f"rank {number}: {''.join(why) or 'it crashed'}")
        return [json.loads(out.splitlines()[-1]) for out, _ in said]


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("prompt", nargs="?", default="What is 17 + 6?")
    prompt = parser.parse_args().prompt
    if "MLX_RANK" in os.environ:
        try:
            print(json.dumps(be_a_rank(prompt)))
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
            print(f"{place}: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
        return 0
    from course.from_zero.small_llama import tokenizer

    try:
        found = launch(prompt)
    except RuntimeError as error:
        print(f"two_ranks.py: {error}", file=sys.stderr)
        return 1
    for number, said in enumerate(found):
        text = tokenizer().tokenizer.decode(said["tokens"])
        print(f"rank {number}: {text}  [{said['messages']} messages, {said['weights']:,} bytes]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
