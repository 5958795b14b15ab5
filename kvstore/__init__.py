"""KV accounting without tensors: geometry and layouts, the page ledger, reservation arithmetic, the pool plan."""
