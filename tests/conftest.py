from __future__ import annotations

import torch

# The matrices of tests are small: threads cost more than they give, above all under xdist.
torch.set_num_threads(1)
