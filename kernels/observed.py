"""Whether a launch must go through a torch operator, for somebody who looks at operators.

Our kernels are launched through Triton, which torch's dispatcher does not see. Each public entry
(an experts kernel's run, every launch of `symm_mem`) therefore is a `torch.library.custom_op` too,
which says what it reads and what it writes: for a dispatch mode such as torch's CUDA stream
sanitizer, for fake and functional tensors, and for torch.compile. Through the dispatcher a call
takes tens to hundreds of microseconds on the host, several times a decode's launches, so it is
taken only while somebody looks; `is_observed` is asked in every call and takes 0.3 us.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_PLAIN = (Tensor, nn.Parameter)
# By names of this module, since attributes are looked up anew in every call.
_is_compiling = torch.compiler.is_dynamo_compiling
_num_modes = torch._C._len_torch_dispatch_stack
_innermost_transform = torch._C._functorch.peek_interpreter_stack
_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()


def is_observed(tensor: Tensor) -> bool:
    """Whether a call with that argument is looked at as an operator of torch.

    A dispatch mode whose attribute `sees_launches` is true watches launches themselves and does
    not count. Under torch.compile always true.
    """
    if _is_compiling() or type(tensor) not in _PLAIN:
        return True
    if _num_modes() == 0:
        return _innermost_transform() is not None
    modes = _get_current_dispatch_mode_stack()
    return not all(getattr(mode, "sees_launches", False) for mode in modes)


def handle_of(owner: Any) -> int:
    """A number by which an operator's body finds a kernel or channel; schemas hold no objects.

    Good while the owner lives, and its own as long.
    """
    handle = id(owner)
    _owners[handle] = owner
    return handle


def owner_of(handle: int) -> Any:
    """What `handle_of` gave the number for. Raises LookupError once that is gone."""
    owner = _owners.get(handle)
    if owner is None:
        raise LookupError(
            f"an operator of ep_runtime was called with the handle {handle} of a kernel that is "
            f"gone; keep the layer alive as long as what was traced or compiled of it"
        )
    return owner
