# SPDX-License-Identifier: Apache-2.0
"""How a model's weights lie: recorded from its own loader, probed, and what else moves them or derives from them."""
