#!/usr/bin/env python3
"""Write one tiny GGUF for each way to keep a context, and what its metadata say, as keys.json.

The real engine loads them, and says how much memory it takes for their context; what they would
answer is nothing. Needs the packages gguf and numpy.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy

import make_model

WIDTH = 64
INNER = 32
EXPERTS = 2
CONTEXT = 131072
USUAL = {"block_count": 6, "attention.head_count": 4, "attention.head_count_kv": 2,
         "attention.key_length": 32, "attention.value_length": 32}
MIXTURE = {"expert_count": EXPERTS, "expert_used_count": 1, "expert_feed_forward_length": INNER}
# By name: the architecture, and its keys beside those that all have.
KINDS = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "qwen3moe": ("qwen3moe", MIXTURE),
    "gemma3": ("gemma3", {"block_count": 12, "attention.sliding_window": 1024}),
    "gpt-oss": ("gpt-oss", {**MIXTURE, "attention.sliding_window": 128, "rope.dimension_count": 32}),
    "gemma4": ("gemma4", {
        "block_count": 12, "attention.head_count_kv": [4, 4, 4, 4, 4, 1] * 2,
        "attention.sliding_window_pattern": ([True] * 5 + [False]) * 2,
        "attention.sliding_window": 512, "attention.key_length": 64, "attention.value_length": 64,
        "attention.key_length_swa": 32, "attention.value_length_swa": 32,
        "attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0}),
    "qwen35": ("qwen35", {
        "block_count": 8, "full_attention_interval": 4, "ssm.conv_kernel": 4, "ssm.state_size": 32,
        "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 128,
        "rope.dimension_sections": [8, 4, 4, 0]}),
    "deepseek2": ("deepseek2", {
        **MIXTURE, "attention.head_count_kv": 1, "attention.q_lora_rank": 48,
        "attention.kv_lora_rank": 96, "attention.key_length": 112, "attention.value_length": 96,
        "attention.key_length_mla": 48, "attention.value_length_mla": 32,
        "rope.dimension_count": 16, "leading_dense_block_count": 6, "expert_shared_count": 1}),
}


def layer_tensors(kind, keys, layer):
    """Give name -> shape, the longest stride first, of what a layer of this kind is made of."""
    heads = keys["attention.head_count"]
    held = keys["attention.head_count_kv"]
    pattern = keys.get("attention.sliding_window_pattern", [])
    behind = "_swa" if pattern and pattern[layer] else ""
    key, value = keys[f"attention.key_length{behind}"], keys[f"attention.value_length{behind}"]
    held = held[layer] if isinstance(held, list) else held
    shapes = {"attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,)}
    if kind == "qwen35" and (layer + 1) % 4:
        state, inner = keys["ssm.state_size"], keys["ssm.inner_size"]
        width = 2 * state * keys["ssm.group_count"] + inner
        ranks = keys["ssm.time_step_rank"]
        shapes.update({
            "attn_qkv.weight": (width, WIDTH), "attn_gate.weight": (inner, WIDTH),
            "ssm_conv1d.weight": (width, keys["ssm.conv_kernel"]), "ssm_dt.bias": (ranks,),
            "ssm_a": (ranks,), "ssm_beta.weight": (ranks, WIDTH), "ssm_alpha.weight": (ranks, WIDTH),
            "ssm_norm.weight": (state,), "ssm_out.weight": (WIDTH, inner)})
    elif kind == "deepseek2":
        rank, rope = keys["attention.kv_lora_rank"], keys["rope.dimension_count"]
        long, short = keys["attention.key_length_mla"], keys["attention.value_length_mla"]
        query = keys["attention.q_lora_rank"]
        shapes.update({
            "attn_q_a_norm.weight": (query,), "attn_kv_a_norm.weight": (rank,),
            "attn_q_a.weight": (query, WIDTH), "attn_q_b.weight": (heads * long, query),
            "attn_kv_a_mqa.weight": (rank + rope, WIDTH),
            "attn_k_b.weight": (heads, rank, long - rope), "attn_v_b.weight": (heads, short, rank),
            "attn_output.weight": (WIDTH, heads * short)})
    else:
        double = 2 if kind == "qwen35" else 1
        shapes.update({
            "attn_q.weight": (heads * key * double, WIDTH), "attn_k.weight": (held * key, WIDTH),
            "attn_v.weight": (held * value, WIDTH), "attn_output.weight": (WIDTH, heads * key)})
        if kind not in ("llama", "gpt-oss"):
            shapes.update({"attn_k_norm.weight": (key,), "attn_q_norm.weight": (key,)})

    if kind in ("gemma3", "gemma4", "gpt-oss", "qwen35"):
        shapes["post_attention_norm.weight"] = (WIDTH,)
    if kind in ("gemma3", "gemma4"):
        shapes["post_ffw_norm.weight"] = (WIDTH,)
    if kind in ("qwen3moe", "gpt-oss"):
        shapes["ffn_gate_inp.weight"] = (EXPERTS, WIDTH)
        shapes.update({f"ffn_{part}_exps.weight": (EXPERTS, INNER, WIDTH) for part in ("gate", "up")})
        shapes["ffn_down_exps.weight"] = (EXPERTS, WIDTH, INNER)
    else:
        shapes.update({f"ffn_{part}.weight": (INNER, WIDTH) for part in ("gate", "up")})
        shapes["ffn_down.weight"] = (WIDTH, INNER)
    if kind == "gpt-oss":
        del shapes["ffn_norm.weight"]
        shapes.update({"attn_sinks.weight": (heads,), "attn_output.bias": (WIDTH,),
                       "ffn_gate_inp.bias": (EXPERTS,), "ffn_down_exps.bias": (EXPERTS, WIDTH),
                       "ffn_gate_exps.bias": (EXPERTS, INNER), "ffn_up_exps.bias": (EXPERTS, INNER)})
    if kind == "qwen35":
        del shapes["ffn_norm.weight"]
    return shapes


def write(path, kind, keys, words):
    writer = gguf.GGUFWriter(str(path), kind)
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(f"{kind}.{key}", value)
        else:
            writer.add_uint32(f"{kind}.{key}", value)
    make_model.write_words(writer, words)
    shapes = {"token_embd.weight": (len(words.tokens), WIDTH), "output_norm.weight": (WIDTH,),
              "output.weight": (len(words.tokens), WIDTH)}
    if kind == "gemma4":
        shapes["rope_freqs.weight"] = (keys["attention.key_length"] // 2,)
    for layer in range(keys["block_count"]):
        shapes.update({f"blk.{layer}.{name}": shape
                       for name, shape in layer_tensors(kind, keys, layer).items()})
    for name, shape in shapes.items():
        writer.add_tensor(name, numpy.zeros(shape, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    directory = Path(sys.argv[1])
    words = make_model.Vocabulary({})
    said = {}
    for name, (kind, more) in KINDS.items():
        keys = {"context_length": CONTEXT, "embedding_length": WIDTH, "feed_forward_length": INNER,
                **USUAL, **more}
        write(directory / f"{name}.gguf", kind, keys, words)
        said[name] = {"general.architecture": kind,
                      **{f"{kind}.{key}": value for key, value in keys.items()}}
    (directory / "keys.json").write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    main()
