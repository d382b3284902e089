# SPDX-License-Identifier: Apache-2.0
"""What a trainer publishes: tensors or shards of a model under checkpoint names."""

from trainer_hooks.source.items import IterableSource, ModuleSource, ParameterSource, SourceItem

__all__ = ["IterableSource", "ModuleSource", "ParameterSource", "SourceItem"]
