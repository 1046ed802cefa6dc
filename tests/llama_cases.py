"""A random checkpoint in Llama's layout, and its logits by loops in float64."""

import numpy as np

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 257,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}


def llama_weights(config=LLAMA, seed=0):
    """Normal weights by the names of transformers, with gains around 1."""
    random = np.random.default_rng(seed)
    E, F, V = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    D = config["head_dim"]
    query, key = (D * config[f"num_{name}_heads"] for name in ("attention", "key_value"))
    shapes = {"model.embed_tokens.weight": (V, E), "model.norm.weight": (E,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (E,),
                "self_attn.q_proj": (query, E),
                "self_attn.k_proj": (key, E),
                "self_attn.v_proj": (key, E),
                "self_attn.o_proj": (E, query),
                "post_attention_layernorm": (E,),
                "mlp.gate_proj": (F, E),
                "mlp.up_proj": (F, E),
                "mlp.down_proj": (E, F),
            }.items()
        }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, E)
    return {
        name: (random.normal(size=shape) * 0.3 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


def llama_logits(weights, config, ids):
    """Logits [T, V] of one row of ids, as the formulas say, in float64, one head at a time."""
    w = {name.removeprefix("model."): x.astype(np.float64) for name, x in weights.items()}
    H, D = config["num_attention_heads"], config["head_dim"]
    group = H // config["num_key_value_heads"]

    def norm(x, gain):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config["rms_norm_eps"]) * gain

    def rotate(x, position):
        turned = np.empty_like(x)
        for i in range(D // 2):
            angle = position * config["rope_theta"] ** (-2 * i / D)
            a, b = x[i], x[i + D // 2]
            turned[i] = a * np.cos(angle) - b * np.sin(angle)
            turned[i + D // 2] = a * np.sin(angle) + b * np.cos(angle)
        return turned

    x = w["embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        p = f"layers.{layer}."
        y = norm(x, w[p + "input_layernorm.weight"])
        q, k, v = (y @ w[f"{p}self_attn.{name}_proj.weight"].T for name in "qkv")
        heads = []
        for h in range(H):
            mine, shared = slice(h * D, (h + 1) * D), slice(h // group * D, (h // group + 1) * D)
            queries = [rotate(row[mine], t) for t, row in enumerate(q)]
            keys = [rotate(row[shared], t) for t, row in enumerate(k)]
            rows = []
            for t, query in enumerate(queries):
                scores = np.array([query @ key for key in keys[: t + 1]]) / np.sqrt(D)
                shares = np.exp(scores - scores.max())
                rows.append(shares / shares.sum() @ v[: t + 1, shared])
            heads.append(np.stack(rows))
        x = x + np.concatenate(heads, axis=-1) @ w[p + "self_attn.o_proj.weight"].T
        y = norm(x, w[p + "post_attention_layernorm.weight"])
        gate = y @ w[p + "mlp.gate_proj.weight"].T
        hidden = gate / (1 + np.exp(-gate)) * (y @ w[p + "mlp.up_proj.weight"].T)
        x = x + hidden @ w[p + "mlp.down_proj.weight"].T
    head = "embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return norm(x, w["norm.weight"]) @ w[head + ".weight"].T
