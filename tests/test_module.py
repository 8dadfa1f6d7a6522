"""Module and Parameter: what they add to torch's, and what they refuse."""

import copy
import ctypes
import io
import pickle
from array import array

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor

from infinicore.nn.module import LoadError, Module, ModuleList, Parameter


class Leaf(Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(size, size))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Tree(Module):
    """One of everything: our child, torch's children, a list, a saved and an unsaved buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = Leaf()
        self.plain = torch.nn.Linear(4, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_modules(2, "layers", Leaf, 3)
        self.register_buffer("table", torch.zeros(5))
        self.register_buffer("scratch", torch.zeros(6), persistent=False)


def whole_matrix() -> Tensor:
    return torch.arange(24.0).view(4, 6)


# Parameter


def test_parameter_is_a_torch_parameter_that_needs_no_gradient_until_asked():
    parameter = Parameter(torch.ones(2))
    assert isinstance(parameter, torch.nn.Parameter) and not parameter.requires_grad
    assert Parameter(torch.ones(2), requires_grad=True).requires_grad


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_parameter_is_printed_as_torchs(requires_grad):
    data = whole_matrix()
    assert repr(Parameter(data, requires_grad=requires_grad)) == repr(torch.nn.Parameter(data, requires_grad))


def test_unsplit_parameter_shares_the_memory_of_its_data():
    data = torch.zeros(3)
    Parameter(data).load(torch.ones(3))
    assert data.tolist() == [1, 1, 1]


@pytest.mark.parametrize("tp_dim", [0, 1])
def test_slices_of_all_ranks_make_up_the_whole(tp_dim):
    slices = [Parameter(whole_matrix(), tp_dim, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat(slices, dim=tp_dim), whole_matrix())


def test_slice_is_dense_and_does_not_keep_the_whole_tensor_alive():
    shard = Parameter(whole_matrix(), 1, 1, 3)
    assert shard.is_contiguous() and shard.untyped_storage().nbytes() == 8 * 4


@pytest.mark.parametrize(
    "split", [(0, 2, 2), (0, -1, 2), (0, 0, 0), (0, 0, -1), (2, 0, 2), (-1, 0, 2), (1, 0, 4)]
)
def test_impossible_split_is_refused(split):
    with pytest.raises(ValueError, match="tp_rank|tp_dim"):
        Parameter(whole_matrix(), *split)


def test_torch_makes_a_parameter_of_its_own_of_the_data_of_ours():
    parameter = Parameter(torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match="detach"):
        torch.nn.Parameter(parameter)
    plain = torch.nn.Parameter(parameter.data)
    assert type(plain) is torch.nn.Parameter and plain.data_ptr() == parameter.data_ptr()


def test_scalar_is_a_parameter_but_cannot_be_split():
    assert Parameter(torch.tensor(1.0)).item() == 1
    with pytest.raises(ValueError, match="does not split"):
        Parameter(torch.tensor(1.0), 0, 0, 2)


def test_parameter_of_a_list_is_refused():
    with pytest.raises(TypeError, match="tensor, found list"):
        Parameter([1.0])


def test_a_wish_to_learn_in_the_place_of_the_split_is_refused():
    with pytest.raises(TypeError, match="tp_dim.*requires_grad"):
        Parameter(whole_matrix(), True)


@pytest.mark.parametrize("tp_dim, kept", [(0, whole_matrix()[2:]), (1, whole_matrix()[:, 3:])])
def test_load_takes_the_whole_tensor_and_keeps_this_ranks_slice(tp_dim, kept):
    shard = Parameter(torch.zeros(4, 6), tp_dim, 1, 2)
    shard.load(whole_matrix())
    assert torch.equal(shard, kept)


@pytest.mark.parametrize("source", [torch.float64, torch.float16, torch.bfloat16])
def test_load_casts_between_floating_dtypes(source):
    parameter = Parameter(torch.zeros(2))
    parameter.load(torch.tensor([1.5, -2.0], dtype=source))
    assert parameter.dtype == torch.float32 and parameter.tolist() == [1.5, -2.0]


@pytest.mark.parametrize("target, source", [("float32", "int64"), ("int64", "float32"), ("int8", "uint8")])
def test_load_refuses_any_other_change_of_dtype(target, source):
    parameter = Parameter(torch.zeros(2, dtype=getattr(torch, target)))
    with pytest.raises(TypeError, match=f"torch.{source}.*torch.{target}"):
        parameter.load(torch.ones(2, dtype=getattr(torch, source)))


def test_load_names_both_shapes_when_they_differ():
    with pytest.raises(ValueError, match=r"\(4, 5\).*\(4, 6\)"):
        Parameter(torch.zeros(4, 6), 1, 0, 2).load(torch.zeros(4, 5))


def test_load_from_or_into_the_meta_device_is_refused():
    with pytest.raises(ValueError, match="holds no values"):
        Parameter(torch.zeros(2)).load(torch.zeros(2, device="meta"))
    with pytest.raises(ValueError, match="no memory"):
        Parameter(torch.zeros(2, device="meta")).load(torch.zeros(2))


def test_load_into_a_parameter_that_learns():
    parameter = Parameter(torch.zeros(2), requires_grad=True)
    parameter.load(torch.ones(2))
    assert parameter.tolist() == [1, 1] and parameter.requires_grad and parameter.is_leaf


FLOATS = array("f", [1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize(
    "blob",
    [
        FLOATS.tobytes(),
        bytearray(FLOATS.tobytes()),
        memoryview(FLOATS),
        FLOATS,
        torch.tensor(FLOATS).numpy(),
        (ctypes.c_float * 4)(*FLOATS),
        memoryview(array("f", [1, 0, 2, 0, 3, 0, 4, 0]))[::2],
    ],
    ids=["bytes", "bytearray", "memoryview", "array", "numpy", "ctypes", "strided"],
)
def test_load_blob_takes_any_bytes_like_object(blob):
    parameter = Parameter(torch.zeros(4))
    parameter.load_blob(blob)
    assert parameter.tolist() == [1, 2, 3, 4]


def test_load_blob_is_the_whole_tensor_in_the_parameters_dtype():
    shard = Parameter(torch.zeros(4, 2, dtype=torch.bfloat16), 0, 1, 2)
    whole = torch.arange(8.0).view(4, 2).bfloat16()
    shard.load_blob(whole.view(torch.uint8).numpy().tobytes())
    assert torch.equal(shard, whole[2:])


@pytest.mark.parametrize("num_bytes", [0, 15, 17])
def test_load_blob_of_another_size_is_refused_with_both_sizes(num_bytes):
    with pytest.raises(ValueError, match=f"{num_bytes} bytes.*16 bytes"):
        Parameter(torch.zeros(4)).load_blob(bytes(num_bytes))


@pytest.mark.parametrize(
    "thing", [5, "text", [1, 2], None, torch.zeros(4)], ids=lambda thing: type(thing).__name__
)
def test_load_blob_of_something_without_bytes_is_refused(thing):
    with pytest.raises(TypeError, match="bytes-like"):
        Parameter(torch.zeros(4)).load_blob(thing)


def test_an_empty_parameter_loads_a_blob_of_no_bytes_and_no_other():
    empty = Parameter(torch.zeros(0, 3))
    empty.load_blob(b"")
    assert empty.shape == (0, 3)
    with pytest.raises(ValueError, match="1 bytes.*0 bytes"):
        empty.load_blob(b"x")


def pickled(parameter: Parameter) -> Parameter:
    return pickle.loads(pickle.dumps(parameter))


def saved(parameter: Parameter, weights_only: bool = False) -> Parameter:
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def saved_as_weights(parameter: Parameter) -> Parameter:
    return saved(parameter, weights_only=True)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved, saved_as_weights])
def test_copy_keeps_class_split_and_values_in_memory_of_its_own(copied):
    shard = Parameter(whole_matrix(), 1, 1, 2, requires_grad=True)
    twin = copied(shard)
    assert type(twin) is Parameter and (twin.tp_dim, twin.tp_rank, twin.tp_size) == (1, 1, 2)
    assert torch.equal(twin, shard) and twin.requires_grad and twin.data_ptr() != shard.data_ptr()


@pytest.mark.parametrize("copied", [copy.copy, pickled, saved, saved_as_weights])
def test_copy_keeps_what_was_noted_on_a_parameter(copied):
    parameter = Parameter(torch.zeros(2))
    parameter.weight_decay = 0.5
    assert copied(parameter).weight_decay == 0.5


def test_deepcopy_of_a_module_keeps_tied_parameters_tied():
    pair = ModuleList([Leaf(), Leaf()])
    pair[1].weight = pair[0].weight
    twin = copy.deepcopy(pair)
    assert twin[0].weight is twin[1].weight and twin[0].weight is not pair[0].weight


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.to(torch.float64), lambda m: m.to("meta")])
def test_conversion_of_a_module_keeps_class_and_split(move):
    module = Leaf()
    module.weight = Parameter(whole_matrix(), 1, 1, 2)
    weight = move(module).weight
    assert type(weight) is Parameter and (weight.tp_dim, weight.tp_rank, weight.tp_size) == (1, 1, 2)
    assert weight.shape == (4, 3)


def test_to_empty_brings_a_module_back_from_meta():
    module = Leaf().to("meta").to_empty(device="cpu")
    module.weight.load(torch.ones(4, 4))
    assert module.weight.sum() == 16


# The tree


def test_modules_and_lists_are_torchs_and_ours():
    modules = ModuleList([Leaf(), Leaf()])
    assert isinstance(modules, Module) and isinstance(modules, torch.nn.ModuleList)
    assert isinstance(modules[:1], ModuleList) and len(modules) == 2


def test_register_module_builds_the_class_and_returns_the_child():
    parent = Module()
    child = parent.register_module("leaf", Leaf, size=3)
    assert (
        parent.leaf is child and list(parent.state_dict()) == ["leaf.weight"] and child.weight.shape == (3, 3)
    )


def test_register_module_takes_an_instance_as_torchs_does():
    parent, child = Module(), Leaf()
    assert parent.register_module("leaf", child) is child is parent.leaf


def test_register_module_refuses_arguments_for_an_instance():
    with pytest.raises(TypeError, match="need a Module class"):
        Module().register_module("leaf", Leaf(), 3)


@pytest.mark.parametrize("child", [torch.zeros(1), int, "leaf"], ids=repr)
def test_child_that_is_no_module_is_refused(child):
    with pytest.raises(TypeError):
        Module().add_module("child", child)
    with pytest.raises(TypeError):
        Module().register_module("child", child)


def test_register_modules_names_the_children_by_number():
    parent = Module()
    layers = parent.register_modules(3, "layers", Leaf, 2)
    assert isinstance(layers, ModuleList) and parent.layers is layers
    assert list(parent.state_dict()) == ["layers.0.weight", "layers.1.weight", "layers.2.weight"]
    assert layers[0] is not layers[1]


@pytest.mark.parametrize("wrong", [Leaf(), 3, "Leaf"])
def test_register_modules_of_something_that_makes_no_modules_is_refused(wrong):
    with pytest.raises(TypeError, match=r"^register_modules\('layers'\): expected a Module class, found"):
        Module().register_modules(2, "layers", wrong)


def test_register_modules_of_none_and_of_less():
    assert len(Module().register_modules(0, "layers", Leaf)) == 0
    with pytest.raises(ValueError, match="-1"):
        Module().register_modules(-1, "layers", Leaf)


def test_register_parameter_makes_a_plain_tensor_ours_and_returns_it():
    module = Module()
    parameter = module.register_parameter("scale", torch.ones(2))
    assert module.scale is parameter and type(parameter) is Parameter
    assert module.register_parameter("none", None) is None


def test_register_buffer_returns_the_tensor():
    module, table = Module(), torch.ones(2)
    assert module.register_buffer("table", table) is table is module.table


def test_device_is_that_of_the_first_tensor_or_the_cpu():
    assert Module().device == torch.device("cpu")
    assert Leaf().to("meta").device == torch.device("meta")
    table = Module()
    table.register_buffer("table", torch.zeros(1, device="meta"))
    assert table.device == torch.device("meta")


def test_a_module_may_note_a_device_and_still_tells_where_its_tensors_are():
    class Noting(Leaf):
        def __init__(self) -> None:
            super().__init__()
            self.device = torch.device("meta")

    assert Noting().device == torch.device("cpu")
    empty = Module()
    empty.device = torch.device("meta")
    assert empty.device == torch.device("meta")


# Loading a state


def random_state(module: torch.nn.Module) -> dict[str, Tensor]:
    return {
        key: torch.randn_like(value) if value.is_floating_point() else value + 7
        for key, value in module.state_dict().items()
    }


def test_state_dict_holds_parameters_and_saved_buffers_by_dotted_name():
    keys = set(Tree().state_dict())
    assert {"leaf.weight", "plain.weight", "layers.1.weight", "table", "norm.running_mean"} <= keys
    assert "scratch" not in keys


@pytest.mark.parametrize("assign", [False, True])
def test_state_goes_into_a_tree_with_torchs_children_and_comes_out_equal(assign):
    tree, state = Tree(), random_state(Tree())
    result = tree.load_state_dict(state, strict=True, assign=assign)
    assert result == ([], [])
    assert all(torch.equal(tree.state_dict()[key], value) for key, value in state.items())
    assert type(tree.leaf.weight) is Parameter


def test_state_saved_by_torch_loads_with_weights_only():
    file = io.BytesIO()
    torch.save(Tree().state_dict(), file)
    file.seek(0)
    assert Tree().load_state_dict(torch.load(file, weights_only=True), strict=True) == ([], [])


def test_missing_and_unexpected_names_are_skipped_and_reported():
    tree = Tree()
    result = tree.load_state_dict({"leaf.weight": torch.ones(4, 4), "leaf.other": torch.ones(1)})
    assert result.unexpected_keys == ["leaf.other"] and "plain.weight" in result.missing_keys
    assert "leaf.weight" not in result.missing_keys and tree.leaf.weight.sum() == 16


@pytest.mark.parametrize(
    "state", [{}, {"weight": torch.ones(4, 4), "other": torch.ones(1)}], ids=["less", "more"]
)
def test_strict_load_refuses_missing_and_unexpected_names_and_writes_nothing(state):
    leaf = Leaf()
    with pytest.raises(ValueError, match=r"missing \['weight'\]|unexpected \['other'\]"):
        leaf.load_state_dict(state, strict=True)
    assert leaf.weight.sum() == 0


def test_refusal_is_also_the_error_torch_would_raise():
    with pytest.raises(RuntimeError):
        Leaf().load_state_dict({}, strict=True)
    assert issubclass(LoadError, ValueError)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_wrong_shape_is_refused_with_name_and_shapes_and_nothing_is_written(strict, assign):
    tree, state = Tree(), random_state(Tree())
    state["plain.weight"] = torch.zeros(2, 5)
    before = {key: value.clone() for key, value in tree.state_dict().items()}
    with pytest.raises(ValueError, match=r"'plain.weight'.*\(2, 5\).*\(2, 4\)"):
        tree.load_state_dict(state, strict, assign)
    assert all(torch.equal(tree.state_dict()[key], value) for key, value in before.items())


def test_wrong_dtype_is_refused_with_the_name_and_floats_are_cast():
    leaf = Leaf()
    leaf.load_state_dict({"weight": torch.ones(4, 4, dtype=torch.bfloat16)})
    assert leaf.weight.dtype == torch.float32 and leaf.weight.sum() == 16
    with pytest.raises(TypeError, match="'weight'.*int64.*float32"):
        leaf.load_state_dict({"weight": torch.ones(4, 4, dtype=torch.int64)})


@pytest.mark.parametrize("assign", [False, True])
def test_sparse_tensor_is_refused_with_the_name(assign):
    leaf = Leaf()
    with pytest.raises(TypeError, match="'weight'.*sparse_coo.*strided"):
        leaf.load_state_dict({"weight": torch.ones(4, 4).to_sparse()}, assign=assign)
    with pytest.raises(TypeError, match="sparse_coo"):
        leaf.weight.load(torch.ones(4, 4).to_sparse())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensor_is_refused_with_the_name():
    nested = torch.nested.nested_tensor([torch.ones(4), torch.ones(3)])
    with pytest.raises(TypeError, match="full_tensor is nested"):
        Leaf().weight.load(nested)


@pytest.mark.parametrize("flag", ["strict", "assign"])
def test_a_tensor_in_the_place_of_a_flag_of_loading_is_refused(flag):
    with pytest.raises(TypeError, match=f"load_state_dict: {flag} must be True or False"):
        Leaf().load_state_dict({}, **{flag: torch.ones(2)})


@pytest.mark.parametrize(
    "state", [None, [("weight", 1)], {"weight": [1.0]}, {"other": "text"}, {3: torch.ones(1)}]
)
def test_state_that_is_no_mapping_of_names_to_tensors_is_refused(state):
    with pytest.raises(TypeError, match="mapping|'weight'|'other'|the key 3"):
        Leaf().load_state_dict(state)


def split_leaf(rank: int) -> Leaf:
    leaf = Leaf()
    leaf.weight = Parameter(torch.zeros(4, 6), 1, rank, 2)
    return leaf


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("given", [whole_matrix(), whole_matrix()[:, 3:]], ids=["whole", "own slice"])
def test_split_parameter_takes_the_whole_tensor_or_its_own_slice(given, assign):
    leaf = split_leaf(rank=1)
    leaf.load_state_dict({"weight": given}, assign=assign)
    assert torch.equal(leaf.weight, whole_matrix()[:, 3:]) and leaf.weight.is_contiguous()
    assert leaf.weight.tp_rank == 1


def test_assign_keeps_the_given_memory_and_the_wish_to_learn():
    leaf, given = Leaf().requires_grad_(), torch.ones(4, 4)
    leaf.load_state_dict({"weight": given}, assign=True)
    assert leaf.weight.data_ptr() == given.data_ptr() and leaf.weight.requires_grad


def test_assign_fills_a_module_on_the_meta_device_and_a_copy_is_refused():
    leaf = Leaf().to("meta")
    with pytest.raises(ValueError, match="'weight' is on the meta device"):
        leaf.load_state_dict({"weight": torch.ones(4, 4)})
    leaf.load_state_dict({"weight": torch.ones(4, 4)}, assign=True)
    assert leaf.weight.sum() == 16


@pytest.mark.parametrize("assign", [False, True])
def test_tied_parameter_is_loaded_under_either_name_and_stays_tied(assign):
    pair = ModuleList([Leaf(), Leaf()])
    pair[1].weight = pair[0].weight
    assert pair.load_state_dict({"1.weight": torch.ones(4, 4)}, strict=True, assign=assign) == ([], [])
    assert pair[0].weight is pair[1].weight and pair[0].weight.sum() == 16


def test_a_tied_parameter_is_loaded_by_safetensors_from_the_one_name_it_keeps(tmp_path):
    pair, copied = (ModuleList([Leaf(), Leaf()]) for _ in range(2))
    for tied in (pair, copied):
        tied[1].weight = tied[0].weight
    pair[0].weight.fill_(1)
    save_model(pair, tmp_path / "pair.safetensors")
    assert load_model(copied, tmp_path / "pair.safetensors") == (set(), [])
    assert copied[0].weight is copied[1].weight and copied[0].weight.sum() == 16


@pytest.mark.parametrize("made", [Leaf, lambda: torch.nn.Linear(4, 4, bias=False)])
@pytest.mark.parametrize("names", [("1.weight",), ("0.weight", "1.weight")])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_assigned_parameter_stays_tied_whichever_of_its_names_are_given(made, names, device):
    pair = ModuleList([made(), made()])
    pair[1].weight = pair[0].weight
    pair[0].weight.requires_grad_()
    if device == "meta":
        pair = pair.to("meta")
        pair[1].weight = pair[0].weight
    pair.load_state_dict({name: torch.ones(4, 4) for name in names}, assign=True)
    assert pair[0].weight is pair[1].weight and pair[0].weight.requires_grad
    assert pair[0].weight.sum() == 16


def test_parameter_is_loaded_from_bytes_by_its_dotted_name():
    tree = Tree()
    tree.load_parameter_from_blob("layers.1.weight", torch.arange(9.0).numpy())
    tree.load_parameter_from_blob("plain.bias", torch.ones(2).numpy().tobytes())
    assert tree.layers[1].weight.flatten().tolist() == list(range(9)) and tree.plain.bias.tolist() == [1, 1]


@pytest.mark.parametrize(
    "data, error", [(bytes(35), ValueError), (None, TypeError)], ids=["too short", "none"]
)
def test_bytes_that_do_not_fit_are_refused_with_the_parameters_name(data, error):
    with pytest.raises(error, match="'layers.1.weight': data .*bytes"):
        Tree().load_parameter_from_blob("layers.1.weight", data)


@pytest.mark.parametrize("name", [None, 3, b"leaf.weight"])
def test_parameter_name_that_is_no_string_is_refused(name):
    with pytest.raises(TypeError, match="name must be a string"):
        Tree().load_parameter_from_blob(name, bytes(36))


@pytest.mark.parametrize("name, known", [("leaf.wieght", "leaf.weight"), ("zzz", "plain.weight")])
def test_unknown_parameter_name_is_refused_with_the_closest_ones(name, known):
    with pytest.raises(LoadError, match=f"{name}.*{known}"):
        Tree().load_parameter_from_blob(name, b"")


class Counting(Leaf):
    """What it counts is saved beside its tensors."""

    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("assign", [False, True])
def test_what_a_module_saves_beside_its_tensors_comes_back(assign):
    saved, loaded = ModuleList([Counting(), Counting()]), ModuleList([Counting(), Counting()])
    saved[1].count = 7
    result = loaded.load_state_dict(saved.state_dict(), strict=True, assign=assign)
    assert [one.count for one in loaded] == [0, 7] and result == ([], [])
    missing = Counting().load_state_dict({"weight": torch.zeros(4, 4)}).missing_keys
    assert missing == ["_extra_state"]


def test_a_hook_before_the_load_may_rename_what_it_is_given():
    def renamed(module, state, prefix, *others):
        if prefix + "kernel" in state:
            state[prefix + "weight"] = state.pop(prefix + "kernel")

    tree, given = ModuleList([Leaf(), Leaf()]), {"0.kernel": torch.ones(4, 4), "1.weight": torch.ones(4, 4)}
    for leaf in tree:
        leaf.register_load_state_dict_pre_hook(renamed)
    assert tree.load_state_dict(given, strict=True) == ([], [])
    assert all(leaf.weight.data.sum() == 16 for leaf in tree) and set(given) == {"0.kernel", "1.weight"}


def test_a_hook_before_the_load_sees_a_state_once_with_the_version_it_was_saved_by():
    seen = []

    def turned(module, state, prefix, metadata, strict, *others):
        seen.append((prefix, metadata["version"], strict))
        state[prefix + "weight"] = state[prefix + "weight"].T

    saved, loaded = ModuleList([Leaf(), Leaf()]), ModuleList([Leaf(), Leaf()])
    for one, other in zip(saved, loaded, strict=True):
        one.weight.data.normal_()
        one._version = 3
        other.register_load_state_dict_pre_hook(turned)
    for _ in range(2):  # the hooks are there after a load
        loaded.load_state_dict(saved.state_dict(), strict=True)
        assert all(torch.equal(one.weight.T, other.weight) for one, other in zip(saved, loaded, strict=True))
    assert seen == [("0.", 3, True), ("1.", 3, True)] * 2


def test_what_a_hook_before_the_load_finds_wrong_is_raised_and_nothing_is_written():
    def refused(module, state, prefix, metadata, strict, missing, unexpected, errors):
        errors.append(f"{prefix}weight is of an older kind")

    tree = ModuleList([Leaf()])
    before = tree[0].weight.clone()
    tree[0].register_load_state_dict_pre_hook(refused)
    with pytest.raises(LoadError, match=r"^ModuleList: 0\.weight is of an older kind"):
        tree.load_state_dict({"0.weight": torch.ones(4, 4)})
    assert torch.equal(tree[0].weight, before)
