# SPDX-License-Identifier: Apache-2.0
"""The algebra of changes: files to changes (`decode`), versions to one (`merge`), differences to values (`resolve`).

Knows no store and no run.
"""
