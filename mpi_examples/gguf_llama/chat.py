"""From a question to a prompt, by the model's own chat template."""

from __future__ import annotations

import re

from gguf_llama.errors import LlamaError

__all__ = ["chatml"]

# What makes a template ChatML, and the system message that it puts first when the conversation has none. Templates
# are programs; one is understood here only where it says exactly this.
_MESSAGE = re.compile(
    r"""'<\|im_start\|>' \s*\+\s* message\[['"]role['"]\] \s*\+\s* '(?:\\n|\n)' \s*\+\s*
    message\[['"]content['"]\] \s*\+\s* '<\|im_end\|>' \s*\+\s* '(?:\\n|\n)'""",
    re.VERBOSE,
)
_SYSTEM = re.compile(r"'<\|im_start\|>system(?:\\n|\n)(.*?)<\|im_end\|>(?:\\n|\n)'", re.DOTALL)


def chatml(template: str, question: str) -> str:
    r"""Write the prompt for one question to a ChatML model.

    Parameters
    ----------
    template : str
        The model's own chat template.
    question : str

    Raises
    ------
    LlamaError
        The template is not ChatML, or there is none.

    Examples
    --------
    >>> template = r"{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' "
    >>> template += r"+ message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    >>> print(chatml(template, "Who are you?"))
    <|im_start|>user
    Who are you?<|im_end|>
    <|im_start|>assistant
    <BLANKLINE>
    """
    if not _MESSAGE.search(template):
        raise LlamaError("the model's chat template is not ChatML, the one that is known here: use --raw")
    system = _SYSTEM.search(template)
    turns = [("system", system[1])] if system else []
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in [*turns, ("user", question)])
    return f"{text}<|im_start|>assistant\n"
