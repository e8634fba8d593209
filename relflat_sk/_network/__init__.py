"""A trained network with its loss and data; its layers, found and recorded."""

from relflat_sk._network.attention import explicit_attention
from relflat_sk._network.attention_kernel import MathAttention
from relflat_sk._network.batch_losses import (
    Outcome,
    mean_loss,
    outcome_of,
    outcomes,
    sample_weight,
)
from relflat_sk._network.batch_statistics import check_unmixed, find_mixed
from relflat_sk._network.batches import (
    Batch,
    Batches,
    LoadedBatches,
    check_weights,
    make_batches,
)
from relflat_sk._network.borrowing import autocast_off, borrowed
from relflat_sk._network.compiled import CompiledBody
from relflat_sk._network.constant_prediction import best_constant_loss, output_shape
from relflat_sk._network.convolution_layers import find_convolutions
from relflat_sk._network.criterion_check import warn_unless_mean
from relflat_sk._network.explicit_layers import Explicit, ExplicitLayers
from relflat_sk._network.forwards import ReplacedForwards, has_own_forward
from relflat_sk._network.graph import (
    check_thrice,
    depends_on,
    find_ending,
    find_link,
    has_fused_attention,
    is_piecewise_linear,
)
from relflat_sk._network.input_kinds import check_kind
from relflat_sk._network.inputs import (
    cast_inputs,
    check_finite,
    count_samples,
    floating_parameter,
)
from relflat_sk._network.layer_checks import check_linear, check_rows, few_rows
from relflat_sk._network.layer_maps import LayerMap, select_channels
from relflat_sk._network.layer_record import LayerRecord
from relflat_sk._network.layers import (
    Layer,
    check_layer,
    check_unshared,
    find_layer,
    is_tied,
    is_weight_layer,
    layer_map,
    users_of_weight,
    weight_kind,
    weight_layers,
)
from relflat_sk._network.lipschitz import find_faster_step
from relflat_sk._network.network import Network, layer_names
from relflat_sk._network.norm_layers import find_norms
from relflat_sk._network.outputs import check_part, primary_output, refuse_whole, takes_whole
from relflat_sk._network.processes import Processes, join
from relflat_sk._network.recording import (
    Recorder,
    keep_copies,
    keep_graph,
    layer_input,
    record_order,
    record_tail,
)
from relflat_sk._network.row_source import (
    RowSource,
    as_row_source,
    copy_rows,
    is_on_disk,
    is_row_source,
    mapped_file,
)
from relflat_sk._network.source import Source
from relflat_sk._network.tail import Tail, choose_curvatures, is_large_head
from relflat_sk._network.values import check_stored, find_non_finite
from relflat_sk._network.weight_uses import (
    WeightWatch,
    check_uses,
    find_uses_elsewhere,
    uses_elsewhere,
    watch_frozen,
)

__all__ = [
    "Batch",
    "Batches",
    "CompiledBody",
    "Explicit",
    "ExplicitLayers",
    "Layer",
    "LayerMap",
    "LayerRecord",
    "LoadedBatches",
    "MathAttention",
    "Network",
    "Outcome",
    "Processes",
    "Recorder",
    "ReplacedForwards",
    "RowSource",
    "Source",
    "Tail",
    "WeightWatch",
    "as_row_source",
    "autocast_off",
    "best_constant_loss",
    "borrowed",
    "cast_inputs",
    "check_finite",
    "check_kind",
    "check_layer",
    "check_linear",
    "check_part",
    "check_rows",
    "check_stored",
    "check_thrice",
    "check_unmixed",
    "check_unshared",
    "check_uses",
    "check_weights",
    "choose_curvatures",
    "copy_rows",
    "count_samples",
    "depends_on",
    "explicit_attention",
    "few_rows",
    "find_convolutions",
    "find_ending",
    "find_faster_step",
    "find_layer",
    "find_link",
    "find_mixed",
    "find_non_finite",
    "find_norms",
    "find_uses_elsewhere",
    "floating_parameter",
    "has_fused_attention",
    "has_own_forward",
    "is_large_head",
    "is_on_disk",
    "is_piecewise_linear",
    "is_row_source",
    "is_tied",
    "is_weight_layer",
    "join",
    "keep_copies",
    "keep_graph",
    "layer_input",
    "layer_map",
    "layer_names",
    "make_batches",
    "mapped_file",
    "mean_loss",
    "outcome_of",
    "outcomes",
    "output_shape",
    "primary_output",
    "record_order",
    "record_tail",
    "refuse_whole",
    "sample_weight",
    "select_channels",
    "takes_whole",
    "users_of_weight",
    "uses_elsewhere",
    "warn_unless_mean",
    "watch_frozen",
    "weight_kind",
    "weight_layers",
]
