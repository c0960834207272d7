"""Parameters of the presets in configs/models/, as published: the totals that the hub shows for the safetensors files, a tied head
counted once.

A preset without a line here fails tests/models/test_presets.py.
"""

COUNTS: dict[str, int] = {
    # Our own: vocabulary x dim + layers x (dim x (2 x dim + 2 x key-value width + 3 x ffn) + 2 x dim) + dim
    "llama-10m": 32000 * 192 + 10 * (192 * (2 * 192 + 2 * 64 + 3 * 512) + 2 * 192) + 192,
    "llama-25m": 32000 * 320 + 13 * (320 * (2 * 320 + 2 * 160 + 3 * 896) + 2 * 320) + 320,
    "llama-60m": 32000 * 512 + 15 * (512 * (2 * 512 + 2 * 256 + 3 * 1408) + 2 * 512) + 512,
    "llama-125m": 32000 * 768 + 16 * (768 * (2 * 768 + 2 * 256 + 3 * 2048) + 2 * 768) + 768,
    # meta-llama on the hub
    "llama2-7b": 6_738_415_616,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    # TinyLlama/TinyLlama_v1.1
    "tinyllama-1.1b": 1_100_048_384,
    # HuggingFaceTB
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    # mistralai/Mistral-7B-v0.3 and v0.1
    "mistral-7b": 7_248_023_552,
    "mistral-7b-v0.1": 7_241_732_096,
    # Qwen
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,  # the hub shows 751,632,384: its file has the tied head twice
    "qwen3-1.7b": 1_720_574_976,  # 2,031,739,904, likewise
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    # google
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    # The hub's totals without the vision tower (SigLIP, 416,866,032) and its projection (1,152 x dim + 1,152).
    "gemma3-4b": 4_300_079_472 - 416_866_032 - 1152 * (2560 + 1),
    "gemma3-12b": 12_187_325_040 - 416_866_032 - 1152 * (3840 + 1),
    "gemma3-27b": 27_432_406_640 - 416_866_032 - 1152 * (5376 + 1),
    # allenai
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
    # microsoft
    "phi3-mini": 3_821_079_552,
    "phi3-medium": 13_960_238_080,
    "phi4": 14_659_507_200,
    # openai-community: tensors of the published files
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    # the table in the README of EleutherAI/pythia
    "pythia-14m": 14_067_712,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    # mistralai, Qwen, deepseek-ai (without layer 61 and the 58 x 256 balancing biases), openai: tensors of the published files
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "moe-40m-a10m": 41_473_280,  # our own
    # google-t5, google (t5-v1_1 and flan-t5)
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1.1-small": 76_961_152,
    "t5-v1.1-base": 247_577_856,
    "t5-v1.1-large": 783_150_080,
    "t5-v1.1-xl": 2_849_757_184,
    "t5-v1.1-xxl": 11_135_332_352,
}
