"""GPT-2 as in Hugging Face's transformers, small and without that library."""

import torch
from torch import nn
from torch.nn import functional as F


class Conv1D(nn.Module):
    """A copy of `transformers.pytorch_utils.Conv1D`: a linear layer with a transposed weight."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.nx = nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x):
        size_out = (*x.size()[:-1], self.nf)
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(size_out)


def conv1d(nx, nf):
    layer = Conv1D(nf, nx)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    return layer


class LoraLayer(nn.Module):
    """The parts of PEFT's `LoraLayer` by which it is recognised, with one adapter."""

    merged = disable_adapters = False
    active_adapters = ("default",)

    def __init__(self, base_layer, m, d, rank=2):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(m, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, d, bias=False)})

    @property
    def bias(self):
        return self.base_layer.bias

    def get_delta_weight(self, adapter):
        change = 1.5 * self.lora_B[adapter].weight @ self.lora_A[adapter].weight
        return change.T if isinstance(self.base_layer, Conv1D) else change

    def forward(self, x):
        return self.base_layer(x) + 1.5 * self.lora_B["default"](self.lora_A["default"](x))


def ForCausalLMLoss(logits, labels, vocab_size):
    """A copy of the loss of causal language models in `transformers.loss.loss_utils`."""
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, vocab_size), labels.view(-1), ignore_index=-100)


class GPT2(nn.Module):
    """One block, and a head that is tied to the embedding."""

    def __init__(self, vocabulary=7, width=4, tie=True):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(5, width)
        self.ln_1 = nn.LayerNorm(width)
        self.c_attn = conv1d(width, 3 * width)
        self.c_proj = conv1d(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc = conv1d(width, 6)
        self.c_out = conv1d(6, width)
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tie:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        h = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        q, k, v = self.c_attn(self.ln_1(h)).view(*ids.shape, 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.c_proj(mixed.transpose(1, 2).flatten(2))
        h = h + self.c_out(F.gelu(self.c_fc(self.ln_2(h)), approximate="tanh"))
        return {"logits": self.lm_head(self.ln_f(h))}


class GPT2LMHeadModel(GPT2):
    """The same with the interface and the loss of transformers."""

    loss_function = staticmethod(ForCausalLMLoss)
    config = None

    def forward(self, input_ids, attention_mask=None, labels=None):
        out = super().forward(input_ids)
        if labels is not None:
            vocabulary = out["logits"].shape[-1]
            out["loss"] = self.loss_function(out["logits"], labels, vocabulary)
        return out
