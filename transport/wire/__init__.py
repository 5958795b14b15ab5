"""Every message that crosses a process boundary, one file per conversation.

Rules: array_like structs with integer tags, frozen, append-only with defaults (an old decoder ignores trailing
fields, a new one fills defaults, an unknown tag raises). Arrays travel as little-endian bytes columns, never as
lists; `columns.py` names the types. A golden-bytes test pins every struct; a change that isn't an append raises
`WIRE_VERSION`, which Hello compares.
"""
