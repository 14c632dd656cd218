"""One operation on many tensors: private names of torch 2.13, here in one place."""

import torch

foreach_add_ = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
foreach_copy_ = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
