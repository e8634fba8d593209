"""A trained network with its loss and data; its layers, found and recorded."""

from relflat_sk._network.batches import (
    Batch,
    Batches,
    LoadedBatches,
    RowSource,
    arrays_of,
    as_row_source,
    cast_inputs,
    check_finite,
    check_kind,
    check_weights,
    copy_rows,
    count_samples,
    floating_parameter,
    is_on_disk,
    is_row_source,
    make_batches,
    map_arrays,
    mapped_file,
)
from relflat_sk._network.borrowing import (
    MathAttention,
    ReplacedForwards,
    autocast_off,
    borrowed,
    explicit_attention,
    has_own_forward,
    one_thread,
)
from relflat_sk._network.explicit_layers import ExplicitLayers, find_fused
from relflat_sk._network.layer_checks import (
    WeightWatch,
    check_linear,
    check_rows,
    check_unmixed,
    check_uses,
    few_rows,
    find_mixed,
    find_uses_elsewhere,
    uses_elsewhere,
)
from relflat_sk._network.layer_maps import LayerMap, select_channels
from relflat_sk._network.layers import (
    Layer,
    check_stored,
    check_unshared,
    find_layer,
    find_non_finite,
    is_weight_layer,
    layer_map,
    sharing_modules,
    weight_kind,
    weight_layers,
)
from relflat_sk._network.network import (
    Network,
    Outcome,
    Source,
    best_constant_loss,
    check_part,
    layer_names,
    mean_loss,
    outcome_of,
    outcomes,
    output_shape,
    primary_output,
    refuse_whole,
    sample_weight,
    takes_whole,
    warn_unless_mean,
)
from relflat_sk._network.processes import Processes, join
from relflat_sk._network.recording import (
    CompiledBody,
    LayerRecord,
    Recorder,
    features_of,
    keep_graph,
    kept_buffers,
    layer_input,
    record_order,
    record_tail,
)
from relflat_sk._network.tail import (
    Tail,
    check_thrice,
    choose_curvatures,
    depends_on,
    find_ending,
    find_faster_step,
    find_link,
    find_multiplier,
    has_fused_attention,
    is_piecewise_linear,
)
