"""`nanobatch completion`: a script for bash that completes commands and options.

    nanobatch completion > ~/.local/share/bash-completion/completions/nanobatch

The options are read from each program's --help, once, when the script is written. zsh takes the same
script after `autoload -U bashcompinit && bashcompinit`.
"""

import re
import subprocess
from collections.abc import Mapping
from functools import cache

from base import installation

SCRIPT = """\
_nanobatch() {{
    local options
    case "${{COMP_WORDS[1]}}" in
{cases}
    *) options="" ;;
    esac
    if [[ $COMP_CWORD == 1 && "$2" != -* ]]; then
        COMPREPLY=($(compgen -W "{words}" -- "$2"))
    elif [[ "$2" == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$2"))
    else
        COMPREPLY=()
    fi
}}
complete -o default -F _nanobatch nanobatch
"""


def script(programs: Mapping[str, str], words: list[str]) -> str:
    """`programs`: the file of each command, such as serve.py of serve."""
    cases = [f'    {word}) options="{options_of(file)}" ;;' for word, file in programs.items()]
    cases.append(f'    -*) options="{options_of("tui.py")}" ;;')
    return SCRIPT.format(cases="\n".join(cases), words=" ".join(words))


@cache
def options_of(file: str) -> str:
    done = subprocess.run(
        [*installation.start(file), "--help"], capture_output=True, text=True, check=True
    )
    return " ".join(sorted({*re.findall(r"(?<![\w-])--[a-z][\w-]*", done.stdout)}))
