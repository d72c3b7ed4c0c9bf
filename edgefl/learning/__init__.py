"""Models as flat vectors, examples and their split among clients, local training and the test.

    flat.py        a module's parameters as views of one flat float32 vector
    models.py      the built-in models by name, and a user's own; networks.py: those of papers
    benchmark_networks.py  those that phones were measured on; timm_networks.py: timm's by name
    data.py        the data sets by name, and a user's own
    image_sets.py  digits, MNIST, FashionMNIST, CIFAR-10
    number_sets.py scikit-learn's diabetes: numbers to predict a number from
    leaf.py        the data sets of the LEAF benchmark
    array_set.py   arrays in a safetensors file
    dataset.py     examples in memory, made float32 a batch at a time
    partition.py   which client holds which examples
    rule.py        a trip's steps, as data
    losses.py      the losses by name, and a user's own
    train.py       a client's local SGD; custom.py: a user's own function in its place
    flower_client.py  a Flower app's client in its place
    evaluate.py    the test of a model
    arithmetic.py  device, precision, layout, torch's random stream
    work.py        what a step does by class of operation; operations.py: that as data; live.py: live tensors

torch is imported by these modules only (`rule` and `operations` do not need it), never by the command line.
"""
