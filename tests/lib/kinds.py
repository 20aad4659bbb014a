"""Examples of each kind of sampling settings, by name."""

KINDS = {
    "greedy": {},
    "open": {"temperature": 0.8},
    "logprobs=0": {"logprobs": 0},
    "logprobs=20": {"logprobs": 20},
    "logit_bias": {"logit_bias": {token: (token % 7) - 3.0 for token in range(200)}},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -0.7, "temperature": 0.6},
    "top_k": {"temperature": 1.0, "top_k": 40},
    "a large top_k": {"temperature": 1.3, "top_k": 90},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "a short list of everything": {
        "temperature": 0.7,
        "top_k": 9,
        "top_p": 0.8,
        "min_p": 0.1,
        "logprobs": 5,
    },
    "all": {
        "temperature": 1.1,
        "top_k": 80,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "logprobs": 3,
        "logit_bias": {5: 2.0, 8: -1000.0},
    },
}
