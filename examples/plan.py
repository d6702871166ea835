"""What attention costs, from configs alone: three models at a long context, and what merging heads would save."""

from headwise import plan

for name in ("llama-3-8b", "gemma-3-27b", "deepseek-v3"):
    costs = plan.of(name, context=131072)
    (cost,) = costs.contexts
    print(f"{name}: {costs.kind}; {costs.bytes_per_token:,} bytes a token, {cost.cache_bytes / 2**30:.1f} GiB")

merged = plan.of("llama-3-8b", context=131072, heads_plan={"layers": {"*": {"kv_heads": 2}}})
assert merged.planned is not None
print(f"with 2 key-value heads: {merged.planned.contexts[0].cache_bytes / 2**30:.1f} GiB")

print(plan.of("gpt-oss-20b", context=8192, bandwidth="3.35TB/s", flops="990TF"))
