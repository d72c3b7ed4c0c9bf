"""What is learned: the model as one flat vector, the examples, who holds them, and the local training.

    flat.py       a module's parameters as views of one flat float32 vector
    models.py     the built-in models: cnn.py, recurrent.py, and a user's own
    data.py       the data sets: digits.py, idx.py (MNIST), cifar.py, leaf.py, and a user's own
    dataset.py    examples in memory, made float32 a batch at a time
    leaf_examples.py, leaf_photos.py  what LEAF's examples are; CelebA's pictures
    partition.py  which client holds which examples
    rule.py       a trip's steps, as data
    train.py      a client's local SGD
    arithmetic.py on which device, how precisely
    randomness.py torch's random stream, borrowed
    evaluate.py   the server's test
    flops.py      what one example costs

torch is imported by these modules only (`rule` does not need it), never by the command line.
"""
