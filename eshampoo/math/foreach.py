"""One operation on many tensors, and code that is not compiled: private names of torch 2.13."""

import torch

foreach_add_ = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
foreach_copy_ = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]

# `torch.compiler.disable` without the slow import at the time of decoration.
not_compiled = torch._disable_dynamo  # type: ignore[attr-defined]
