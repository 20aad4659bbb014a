"""Plant small mistakes in our code, one at a time, and check that a test fails for each.

    python tests/mutants.py                     all of them, in a few minutes
    python tests/mutants.py --only sched.py     those whose file, function, code or test contains this

Each mutant is applied to a copy of the checkout, and its test runs there. A mutant names a function and
an expression or a statement in it, which are compared as syntax trees, so whitespace and comments do
not matter. If the function has no such expression, or several, the mutant is stale: the program reports
it, and somebody has to plant the mistake again.

The exit code is 1 unless all mutants are caught.
"""

import argparse
import ast
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIMIT_S = 300  # per test
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", ".*_cache", "build", "dist", "*.egg-info"
)


class Mutant(NamedTuple):
    file: str
    function: str  # "function" or "Class.method"
    old: str  # an expression or a statement
    new: str  # the replacement; empty removes it
    test: str

    @property
    def name(self) -> str:
        old, new = (" ".join(code.split()) for code in (self.old, self.new))
        return f"{self.file} {self.function}: {old} -> {new or 'nothing'}"


SCHED = "tests/core/test_sched.py"
REUSE = "tests/core/test_prefix_caching.py"
CHOICE = "tests/core/test_slot_choice.py"
SLOTS = "tests/engine/test_disk_prefix_cache.py"
FAULTS = "tests/core/test_failures.py"
ENGINE = "tests/core/test_engine.py"
SAMPLING = "tests/core/test_sampling.py"
STATES = "tests/core/test_states.py"
SPECULATIVE = "tests/core/test_speculative.py"
OPS = "tests/models/test_ops.py"
DOOR = "tests/server/test_app.py"
SERVE = "tests/server/test_serve.py"
WIRE = "tests/server/test_watch_frames.py"
AUTH = "tests/server/test_auth.py"
TEXT = "tests/text/test_tokenizer.py"
SPEECH = "tests/text/test_tool_parser.py"
GRAMMAR = "tests/text/test_grammar.py"
TRIALS = "tests/base/test_sandbox.py"
LESSONS = "tests/screen/test_lessons.py"
TOTALS = "tests/screen/test_busy_periods.py"
COLUMNS = "tests/screen/test_timeline_columns.py"

END = "    if handle.id in self.registry.open:\n        self._end(handle, 'cancelled')"

MUTANTS = [
    Mutant(
        "sched.py",
        "Scheduler.submit",
        "len(self.waiting) - self._admissible()",
        "len(self.waiting)",
        f"{SCHED}::test_queue_limit_ignores_requests_with_a_free_slot",
    ),
    Mutant(
        "request.py",
        "Request.has_next",
        "self.planned < self.max_tokens",
        "self.planned <= self.max_tokens",
        f"{SCHED}::test_no_step_is_planned_after_the_last_token",
    ),
    Mutant(
        "sched.py",
        "Scheduler._allot",
        "reserved = 0",
        "",
        f"{SCHED}::test_short_prompt_does_not_wait_for_a_long_one",
    ),
    Mutant(
        "sched.py",
        "Scheduler.commit",
        "request.end",
        "False",
        f"{SCHED}::test_random_schedules",
    ),
    Mutant(
        "sched.py",
        "Scheduler.finish",
        "self.waiting.pop(request.id, None)",
        "",
        f"{SCHED}::test_cancel_frees_the_slot_for_the_next_plan",
    ),
    Mutant(
        "sched.py",
        "Scheduler._keep_proven_rows",
        "(request.proven, request.prefilled + request.planned + PADDING)",
        "(request.proven + 1, request.prefilled + request.planned + PADDING)",
        f"{SCHED}::test_slot_keeps_its_rows_after_a_cancel",
    ),
    Mutant(
        "sched.py",
        "Scheduler.start_over",
        "sorted((self.running | self.waiting).items())",
        "(self.waiting | self.running).items()",
        f"{SCHED}::test_restart_keeps_the_order_of_arrival",
    ),
    Mutant(
        "request.py",
        "Request.append_token",
        "self.proven = 0",
        "",
        f"{REUSE}::test_cancel_keeps_the_cache_and_error_drops_it",
    ),
    Mutant(
        "policies.py",
        "by_turns",
        "max(request.queued.arrival_step, request.queued.fairness_turn)",
        "request.queued.arrival_step",
        f"{SCHED}::test_fair_breaks_ties_by_last_service",
    ),
    Mutant(
        "state_places.py",
        "StatePlaces._free_checkpoint",
        "place not in busy",
        "True",
        f"{STATES}::test_moves_in_random_schedules",
    ),
    Mutant(
        "state_places.py",
        "StatePlaces.plan",
        "{running.place for running in self.running.values()}",
        "set()",
        f"{STATES}::test_moves_in_random_schedules",
    ),
    Mutant(
        "state_places.py",
        "StatePlaces.plan",
        "busy.add(target)",
        "",
        f"{STATES}::test_moves_in_random_schedules",
    ),
    # Only the assertion that no state is both read and written in one step catches the next two
    Mutant(
        "state_places.py",
        "StatePlaces.plan",
        "self._free_checkpoint(busy)",
        "self._free_checkpoint({running.place for running in self.running.values()})",
        f"{STATES}::test_moves_in_random_schedules",
    ),
    Mutant(
        "state_places.py",
        "StatePlaces.plan",
        "busy.add(target)",
        "(busy := {running.place for running in self.running.values()} | {target})",
        f"{STATES}::test_moves_in_random_schedules",
    ),
    Mutant(
        "state_places.py",
        "StatePlaces.plan",
        "keep = decode.position",
        "keep = stop - 1",
        f"{STATES}::test_moves_in_random_schedules",
    ),
    Mutant(
        "state_places.py",
        "Place.serves",
        "tokens < self.base",
        "False",
        f"{STATES}::test_a_state_serves_from_its_base_to_its_log_end",
    ),
    Mutant(
        "state_places.py",
        "StatePlaces.leave",
        "place.newest = min(place.newest, request.proven)",
        "",
        f"{STATES}::test_a_rejected_draft_token_serves_nobody",
    ),
    Mutant(
        "state_places.py",
        "StatePlaces.end_of_chunk",
        "start < fork < stop",
        "False",
        f"{STATES}::test_users_of_a_system_prompt",
    ),
    Mutant(
        "kernels/delta_net.py",
        "States.change",
        "self.memory = mx.depends(self.memory, y)",
        "",
        "tests/kernels/test_delta_net.py::test_formula_at_any_cut",
    ),
    Mutant(
        "prefix.py",
        "Prefixes.match",
        "self._longest(trail, len(trail.tokens) - 1, slots)",
        "self._longest(trail, len(trail.tokens), slots)",
        f"{SCHED}::test_longest_cached_prefix_is_found",
    ),
    Mutant(
        "prefix.py",
        "Prefixes.begin_alike",
        "any(node in other.nodes[n - 1 : n] for other in others)",
        "False",
        f"{REUSE}::test_shared_system_prompt_is_computed_once",
    ),
    Mutant(
        "prefix.py",
        "Prefixes.choose_slot",
        "self._rows_lost(slot, common, (*free, *staying))",
        "0",
        f"{CHOICE}::test_only_new_tokens_are_read_where_slots_suffice",
    ),
    Mutant(
        "runner.py",
        "ForwardBatch.passes",
        "prefill.copied_from in written",
        "False",
        f"{REUSE}::test_shared_system_prompt_is_computed_once",
    ),
    Mutant(
        "prefix.py",
        "Prefixes.record_rows",
        "node.slots.discard(slot)",
        "",
        f"{SCHED}::test_longest_cached_prefix_is_found",
    ),
    Mutant(
        "request.py",
        "Request.begin_prefill",
        "min(chunk.start, max(own, saved))",
        "chunk.start",
        f"{DOOR}::test_cached_tokens_reveal_no_other_clients_prompt",
    ),
    Mutant(
        "kv.py",
        "Window.__init__",
        "all(0 <= start <= slab.length - L for start in starts)",
        "all(0 <= start <= slab.length - L for start in starts[:1])",
        f"{OPS}::test_a_window_outside_the_slab_is_refused",
    ),
    Mutant(
        "kv.py",
        "Window.groups",
        "max(ends[first:i])",
        "ends[i - 1]",
        f"{OPS}::test_mask_is_per_sequence",
    ),
    Mutant(
        "kv.py",
        "Slab.scrub",
        "self.arrays",
        "self.arrays[1:]",
        f"{SPECULATIVE}::test_non_finite_draft_spoils_no_row",
    ),
    Mutant(
        "llama.py",
        "seen",
        "rows > positions - span",
        "rows >= positions - span",
        f"{OPS}::test_sliding_window_mask",
    ),
    Mutant(
        "llama.py",
        "attention",
        "scale = 1.0",
        "",
        "tests/kernels/test_gpu.py::test_tokens_equal_mlx_lm_under_every_policy",
    ),
    Mutant("llama.py", "heads", "c.H + c.Hkv", "c.H", f"{OPS}::test_fused_projection_head_order"),
    Mutant(
        "sampling.py",
        "keep_first",
        "above < filters.mass * spread.total",
        "above <= filters.mass",
        f"{SAMPLING}::test_bisection_keeps_what_a_sort_would_keep",
    ),
    Mutant(
        "kernels/slot_biases.py",
        "SlotBiases.bias",
        "built_for is not wanted",
        "not built_for",
        f"{SAMPLING}::test_next_request_in_a_slot_has_its_own_bias",
    ),
    Mutant(
        "sampling.py",
        "apply_penalties",
        "mx.arange(width) < column(counts)",
        "mx.arange(width) <= column(counts)",
        f"{SAMPLING}::test_penalties_count_the_answer_alone",
    ),
    Mutant(
        "runner.py",
        "Runner.start_sampling",
        "first >= 0",
        "first > 0",
        f"{ENGINE}::test_token_0_is_a_token_like_any_other",
    ),
    Mutant(
        "nanobatch.py",
        "Engine.submit",
        "self.changed.notify_all()",
        "",
        f"{ENGINE}::test_submit_wakes_an_idle_engine",
    ),
    Mutant(
        "nanobatch.py",
        "Engine.cancel",
        f"with self._changing(), self.changed:\n{END}",
        f"with self._changing():\n{END}",
        f"{ENGINE}::test_cancel_frees_the_slot_in_every_phase",
    ),
    Mutant(
        "nanobatch.py",
        "Engine._fail",
        "self.lifecycle.needs_slab = True",
        "",
        f"{FAULTS}::test_failed_step_frees_its_memory",
    ),
    Mutant(
        "engine/disk_prefix_cache.py",
        "SlotCache._list",
        "saved.key != self._key",
        "not saved.key",
        f"{SLOTS}::test_file_of_another_model_is_ignored",
    ),
    Mutant(
        "engine/disk_prefix_cache.py",
        "key_of",
        'facts.append(f"{name} {value}")',
        "",
        f"{SLOTS}::test_how_a_model_computes_is_part_of_it",
    ),
    Mutant(
        "engine/slot_files.py",
        "SlotFolder.read_tensors",
        "blake2b(data[:-DIGEST], digest_size=DIGEST).digest() != data[-DIGEST:]",
        "len(data) < DIGEST",
        f"{SLOTS}::test_damaged_file_is_never_answered_from",
    ),
    Mutant(
        "server/tokenize_request.py",
        "tokenize",
        'settings["seed"] += 1',
        'settings["seed"] += 0',
        f"{SERVE}::test_choices_have_consecutive_seeds",
    ),
    Mutant(
        "server/stream.py",
        "AnswerWriter.prefill_to_log",
        "self._logged = now",
        "",
        f"{DOOR}::test_log_reports_progress_of_long_prompts",
    ),
    Mutant(
        "server/stream.py",
        "AnswerWriter._usage",
        "metrics[:: self._parsed.n]",
        "metrics",
        f"{SERVE}::test_choices_have_consecutive_seeds",
    ),
    Mutant(
        "server/choice.py",
        "Choice._start",
        "item.nth + 1",
        "item.nth",
        "tests/server/test_choice.py::test_calls_are_numbered_among_themselves",
    ),
    Mutant(
        "server/choice.py",
        "Words.finish",
        "word.offset < len(text)",
        "word.offset <= len(text)",
        "tests/server/test_choice.py::test_words_end_with_the_answer",
    ),
    Mutant(
        "server/app.py",
        "APIServer._on_commit",
        "writer and (writer.is_stream or handle.request.finish_reason)",
        "writer",
        "tests/server/test_delta.py::test_one_wake_up_per_step",
    ),
    Mutant(
        "server/app.py",
        "APIServer._complete",
        "request.answer.end()",
        "",
        "tests/server/test_memory.py::test_no_leak_from_ended_requests",
    ),
    Mutant(
        "server/auth.py",
        "guard",
        "is_ours and (options.api_key is not None or is_address(request.host))",
        "is_ours",
        f"{AUTH}::test_foreign_pages_are_refused",
    ),
    Mutant(
        "server/auth.py",
        "may_read",
        "is_here and not has_proxy and request.host in LOOPBACK",
        "is_here and request.host in LOOPBACK",
        f"{AUTH}::test_texts_through_a_local_proxy",
    ),
    Mutant(
        "server/auth.py",
        "guard",
        'path in ("/", "/health")',
        'path.startswith("/")',
        f"{AUTH}::test_api_key_protects_all_but_health",
    ),
    Mutant(
        "server/access_log.py",
        "AccessLog.add",
        "self._lost = 0",
        "",
        f"{DOOR}::test_log_counts_lost_lines",
    ),
    Mutant(
        "engine/watch_frames.py",
        "Sender._cut",
        "request.lengths[tokens:]",
        "request.lengths[characters:]",
        f"{WIRE}::test_frames_survive_the_wire",
    ),
    Mutant(
        "server/anthropic.py",
        "written",
        "usage.prompt - usage.cached",
        "usage.prompt",
        "tests/server/test_conformance.py::test_cached_tokens_are_counted_separately",
    ),
    Mutant(
        "server/responses.py",
        "Response._event",
        "self._sent += 1",
        "",
        "tests/server/test_conformance.py::test_streamed_response_events",
    ),
    Mutant(
        "server/body_reader.py",
        "check_count",
        "count > most",
        "count > most + 1",
        f"{SERVE}::test_counts_in_a_body_are_limited",
    ),
    Mutant(
        "server/embeddings.py",
        "Embedding.whole",
        "enumerate(choices)",
        "enumerate(choices, 1)",
        "tests/server/test_embeddings.py::test_embeddings_in_order",
    ),
    Mutant(
        "text/tokenizer.py",
        "Tokenizer.check_ids",
        "0 <= token < self.vocabulary",
        "0 <= token <= self.vocabulary",
        f"{SAMPLING}::test_token_outside_the_vocabulary_is_refused",
    ),
    Mutant(
        "text/tokenizer.py",
        "Tokenizer.encode",
        "ids[:2] == [bos, bos]",
        "ids[:1] == [bos]",
        f"{TEXT}::test_prompt_has_one_bos",
    ),
    Mutant(
        "text/detokenizer.py",
        "StreamingDetokenizer._release",
        "max(found)",
        "min(found)",
        f"{TEXT}::test_stop_strings_by_hand",
    ),
    Mutant(
        "text/detokenizer.py",
        "StreamingDetokenizer._release",
        "text.removesuffix(self._held)",
        "text",
        f"{TEXT}::test_stop_strings_by_hand",
    ),
    Mutant(
        "text/tool_parser.py",
        "ParserState.parse",
        "self._length - len(self._text)",
        "self._length",
        f"{SPEECH}::test_prompt_may_open_the_reasoning",
    ),
    Mutant(
        "text/tool_parser.py",
        "split_output",
        "CALLING.search(text, len(reasoning))",
        "CALLING.search(text)",
        f"{SPEECH}::test_split_output_without_the_model",
    ),
    Mutant(
        "text/tool_parser.py",
        "ParserState._emit_up_to",
        "words.removesuffix(beginning(mark, words))",
        "words",
        f"{SPEECH}::test_random_answers_are_parsed_however_cut",
    ),
    Mutant(
        "text/grammar.py",
        "Grammar.masks",
        "self.copy()",
        "self",
        f"{GRAMMAR}::test_masks_of_several_tokens_leave_the_state_unchanged",
    ),
    Mutant(
        "text/grammar.py",
        "Grammars._judge",
        "len(self._verdicts) >= KNOWN",
        "False",
        f"{GRAMMAR}::test_grammar_verdicts_are_cached_and_bounded",
    ),
    Mutant(
        "base/sandbox.py",
        "Sandbox.run",
        "if self._unfit:\n    raise ValueError(self._unfit)",
        "",
        f"{TRIALS}::test_failed_prepare_is_remembered",
    ),
    Mutant(
        "screen/state.py",
        "State._absorb_steps",
        "r.reason or id >= oldest",
        "r.reason or id",
        f"{TOTALS}::test_requests_whose_ends_were_missed_are_forgotten",
    ),
    Mutant(
        "screen/state.py",
        "State._forget_requests",
        "min(self.REMEMBERED, max(1, bisect_right(taken, self.TEXTS)))",
        "self.REMEMBERED",
        f"{TOTALS}::test_of_requests_with_long_texts_fewer_can_be_opened",
    ),
    Mutant(
        "screen/state.py",
        "State.finished",
        "r.ended > moment",
        "r.ended >= moment",
        f"{COLUMNS}::test_back_in_time_only_earlier_ends_count",
    ),
    Mutant(
        "screen/state.py",
        "State.select",
        "self.selected %= len(self.view.engine.slots)",
        "self.selected = min(slot, len(self.view.engine.slots) - 1)",
        f"{COLUMNS}::test_after_the_last_slot_the_first_is_selected",
    ),
    Mutant(
        "screen/timeline_columns.py",
        "said_in",
        "rows - prompt + 1",
        "rows - prompt",
        "tests/screen/test_keys.py::test_back_in_time_an_answer_is_cut_where_it_was",
    ),
    Mutant(
        "screen/timeline_columns.py",
        "column",
        "rows[slot] += not is_ghost",
        "rows[slot] += 1",
        f"{COLUMNS}::test_a_ghost_fills_no_row",
    ),
    Mutant(
        "screen/busy_period_stats.py",
        "Period.take_step",
        "len(step.view.decode) - len(step.view.ghosts)",
        "len(step.view.decode)",
        f"{COLUMNS}::test_a_ghost_is_no_gap_between_two_tokens",
    ),
    Mutant(
        "screen/draw/style.py",
        "visible",
        '("Cc", "Cf", "Cs", "Zl", "Zp")',
        '("Cc", "Cs", "Zl", "Zp")',
        "tests/screen/test_style.py::test_what_draws_nothing_is_shown_as_such",
    ),
    Mutant(
        "screen/draw/charts.py",
        "lesson",
        "many / few / cost",
        "many / few * cost",
        f"{LESSONS}::test_why_batching_pays_by_rows",
    ),
    Mutant(
        "screen/draw/charts.py",
        "lesson",
        "min(costs)",
        "next(iter(costs))",
        f"{COLUMNS}::test_the_cost_of_a_row_in_words",
    ),
    Mutant(
        "screen/export_recording.py",
        "renumbered",
        "step.step - first + 1",
        "step.step - first",
        "tests/screen/test_recording.py::test_a_race_is_recorded_as_two_runs",
    ),
    Mutant(
        "screen/chat_history.py",
        "Chat.messages",
        "turn.is_dropped or turn.request.error",
        "turn.request.error",
        "tests/screen/test_conversation_page.py::test_a_question_that_does_not_fit_waits_for_drop_or_new",
    ),
    Mutant(
        "screen/remote_client.py",
        "RemoteEngineClient._receive_frame",
        "self._epoch += 1",
        "",
        "tests/screen/test_watch.py::test_a_lost_server_is_shown_and_reconnected",
    ),
    Mutant(
        "tui.py",
        "parse_arguments",
        "len(args.size) != 2",
        "len(args.size) > 2",
        "tests/screen/test_log.py::test_a_wrong_option_gets_one_line_and_exit_code_2",
    ),
    Mutant(
        "tui.py",
        "failed",
        "return 2",
        "return 1",
        "tests/screen/test_keys.py::test_a_model_that_cannot_be_loaded_gives_exit_code_2",
    ),
]


class StaleError(Exception):
    """Raised when the code to change is missing or ambiguous."""


class Replaced(ast.NodeTransformer):
    """A transformer that replaces each node that equals `old`, and counts the replacements."""

    def __init__(self, old: ast.AST, new: ast.AST):
        self.old = old
        self.new = new
        self.code = ast.unparse(old)
        self.count = 0

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, type(self.old)) and ast.unparse(node) == self.code:
            self.count += 1
            return self.new
        return self.generic_visit(node)


def mutated(text: str, mutant: Mutant) -> str:
    """Return the file's text with the mistake planted."""
    tree = ast.parse(text)
    replaced = Replaced(*parsed(mutant.old, mutant.new))
    functions = list(named(tree, mutant.function.split(".")))
    if len(functions) != 1:
        raise StaleError(f"{mutant.file} has no function {mutant.function}")
    functions[0].body = [replaced.visit(node) for node in functions[0].body]
    if replaced.count != 1:
        raise StaleError(f"{mutant.function} has {replaced.count} times {mutant.old!r}")
    return ast.unparse(ast.fix_missing_locations(tree))


def parsed(old: str, new: str) -> tuple[ast.AST, ast.AST]:
    (before,) = ast.parse(old).body
    if isinstance(before, ast.Expr):
        return before.value, ast.parse(new or "None", mode="eval").body
    (after,) = ast.parse(new or "pass").body
    return before, after


def named(node: ast.AST, path: list[str]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in getattr(node, "body", []):
        if getattr(child, "name", None) == path[0]:
            if path[1:]:
                yield from named(child, path[1:])
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield child


def run_tests(checkout: Path, *tests: str) -> subprocess.CompletedProcess:
    """Run tests in the copy, against its own files only."""
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-n", "0", *tests]
    limit = LIMIT_S * len(tests)
    return subprocess.run(
        command, cwd=checkout, capture_output=True, text=True, timeout=limit, check=False
    )


def outcome(checkout: Path, mutant: Mutant) -> str:
    """Return "caught", or the reason why the mutant was not caught."""
    path = checkout / mutant.file
    text = path.read_text()
    try:
        path.write_text(mutated(text, mutant))
        code = run_tests(checkout, mutant.test).returncode
    except StaleError as error:
        return f"stale: {error}"
    finally:
        path.write_text(text)
    return "caught" if code == 1 else f"not caught: {mutant.test} ended with {code}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="those with this text in file, function or test")
    only = parser.parse_args().only
    mutants = [mutant for mutant in MUTANTS if only in f"{mutant.name} {mutant.test}"]
    with tempfile.TemporaryDirectory() as folder:
        checkout = shutil.copytree(ROOT, Path(folder) / "checkout", ignore=NOT_COPIED)
        for file in {mutant.file for mutant in mutants}:  # in the format that `mutated` writes
            path = checkout / file
            path.write_text(ast.unparse(ast.parse(path.read_text())))
        done = run_tests(checkout, *sorted({mutant.test for mutant in mutants}))
        # A test that fails without a mutant would catch everything
        if not mutants or done.returncode:
            print(done.stdout[-3000:] if mutants else f"no mutant has {only!r} in its name")
            return 1
        caught = 0
        for mutant in mutants:
            found = outcome(checkout, mutant)
            caught += found == "caught"
            print(f"{mutant.name}: {found}", flush=True)
    print(f"{len(mutants)} mutants, {caught} caught")
    return 0 if caught == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
