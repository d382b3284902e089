# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_delta_snapshot.upkeep``: the publisher's side process; its order is on stdin."""

import sys

from vllm_delta_snapshot.upkeep.upkeep import main

sys.exit(main())
