"""Inside vLLM's processes: the plugin that follows a stream (docs/vllm.md). Nothing heavy loads before the first op."""
