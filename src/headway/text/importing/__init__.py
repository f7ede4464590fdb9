"""Import of token files of other projects into a token store: Megatron, nanoGPT and llm.c, datatrove."""
