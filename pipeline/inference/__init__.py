"""The model side: tree attention and what feeds it. Never Ray, files or logging."""

import logging

# transformers imports torchao where it is installed. torchao then lists the kernels of other
# machines that it could not load, and torch objects to how torchao registers its enums.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
