"""Models as flat vectors, data sets and their partition among clients, local training, evaluation.

    flat.py        a module's parameters as views of one flat float32 vector
    models.py      built-in models by name, timm's models, and the user's own models
    networks.py    models that were published in papers
    benchmark_networks.py  networks whose training times were measured on phones
    data.py        data sets by name, and the user's own data sets
    published_sets.py  digits, MNIST, FashionMNIST, CIFAR-10, and diabetes (a regression data set)
    download.py    downloads of published data sets
    hugging_face.py  images from the Hugging Face Hub
    leaf.py        the data sets of the LEAF benchmark
    array_set.py   arrays in a safetensors file
    dataset.py     examples in memory, converted to float32 one batch at a time
    partition.py   assigns training examples to clients
    flower_partition.py  partitioners of Flower Datasets
    own_process.py  runs packages in separate processes, because their threads would not survive a fork
    growth.py      local data that grow during a run
    rule.py        the steps and batch sizes of a trip, as data
    losses.py      losses by name, and the user's own losses
    train.py       a client's local SGD
    custom.py      training by the user's function
    attacks.py     clients that send harmful updates
    flower_client.py  training by the client of a Flower app
    evaluate.py    evaluation of a model
    arithmetic.py  device, precision, memory layout, torch's random stream
    work.py        the work of a step, counted by class of operation
    attention.py   fused attention as separate operations
    moved.py       the bytes that an operation moves
    declared.py    operations that layers declare
    operations.py  data types for the work of a step
    live.py        memory of live tensors

The modules `growth`, `rule` and `operations` do not import torch.
"""
