"""The errors a user can meet; one line each says what, with which value, and what to do."""


class EPRuntimeError(Exception):
    """Base of every error that ep_runtime raises on purpose."""


class ConfigError(EPRuntimeError, ValueError):
    """A configuration key is unknown, has a wrong value, or contradicts another."""


class PlanError(EPRuntimeError, ValueError):
    """No plan satisfies the configuration on this machine, or ranks disagree about it."""


class CheckpointError(EPRuntimeError, ValueError):
    """A checkpoint is missing tensors, has left-over ones, or has the wrong shapes."""


class CapacityError(EPRuntimeError, RuntimeError):
    """More rows than a buffer holds, where rounds are impossible."""


class RankFailure(EPRuntimeError, RuntimeError):
    """Another rank failed or is gone; names the rank and its reason."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its type's name where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
