"""What torch.compile could not compile, as an error that says where it was."""

from vpipe.errors import CompileError
from vpipe.schedule import Action


def explain_compiler(error: BaseException, rank: int, action: Action | None) -> CompileError | None:
    """The error to raise instead; None if no compiler raised this one."""
    # By name: to import the compiler's own class takes seconds, for nothing if nobody compiles.
    if not any(kind.__name__ == "TorchDynamoException" for kind in type(error).__mro__):
        return None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2]) or "it does not say why"
    place = f"rank {rank}" if action is None else f"rank {rank}, stage {action.stage}, action {action}"
    return CompileError(
        f"{place}: torch.compile failed with {type(error).__name__}: {said}; leave compile out, or see its whole "
        "message with TORCHDYNAMO_VERBOSE=1"
    )
