"""Substitutes for a benchmark's essays and words, written for this project.

RULER's essays may not be redistributed, and its words belong to a package.
Results with the substitutes differ, and have other names.
"""

_ADJECTIVES = """
able amber ancient autumn bitter blue bold brave bright brisk broad calm
careful cheerful civil clear clever coastal cold common coral cosy crisp
curious curly daily dark deep distant dry dusty early eager easy eastern
elder empty evening fair faint famous fast fearless final fine firm flat
fond foreign fresh friendly frosty full gentle giant gilded glad golden
grand green grey hasty hidden high hollow honest humble idle inner ivory
jolly keen kind large late lawful lively lofty lone long loud lucky mellow
merry mild misty modest narrow neat new noble northern odd old open outer
pale patient placid plain polite proud quick quiet rapid rare ready red
restless ripe rough round rural rusty scarlet secret shady sharp shy silent
silver simple sleepy slow small smooth snowy soft solid southern spare
steady steep stern still stony strange strong sturdy subtle sudden sunny
swift tall tame tender thin tidy tiny upper vast velvet violet warm wary
weary western white wide wild willing windy winter wise wooden young
"""

_NOUNS = """
acorn acre alley anchor apple apron arch arrow artist attic axle badger
baker barge barley barn basket bay beacon bean bear beaver bell bench berry
bicycle bird blanket boat bonfire book boot bottle bow branch bread brick
bridge brook broom brush bucket butter button cabin cable camel candle canoe
canvas captain carpet cart castle cat cedar cellar chalk cheese cherry chest
chimney cinder circle clay cliff clock cloud clover coal coat compass copper
cork corner cottage cotton crane creek cricket crow crown cup curtain daisy
deer desk diamond dock door dove drum duck eagle easel echo elm ember engine
falcon farm feather fence fern ferry fiddle field finch flag flame flint
flour flute forest fork fountain fox frog garden garlic gate glacier glove
goat goose grain grape gravel grove hammer harbor hare harp hat hawk hazel
hedge hill hinge hive honey hook horn horse inn iron island ivy jacket jar
kettle key kite kitten ladder lake lamp lantern lark leaf lemon lever library
lily lizard loaf locket log loom maple marble market marsh meadow melon mill
mint mirror mole moon mosaic moss moth mountain mule museum needle nest
notebook nut oak oar oasis ocean olive onion orbit orchard otter oven owl
paddle page paint palace parcel park parrot path pear pebble pen pepper piano
pier pigeon pillow pine pipe plank planet plow plum pocket pond poplar porch
pot prairie puzzle quail quarry quilt rabbit raft rain rake raven reed ribbon
river road robin rock roof root rope rose saddle sail salmon sand scarf
school seal shell shelf shepherd ship shore shovel sled snail sparrow spoon
spring squirrel stable star stone stool storm stove straw stream summit swan
table tailor tea tent thistle thread thunder tide tiger timber torch tower
trail tree trout trumpet tulip tunnel turtle valley vase village violin
wagon wall walnut water wave weaver well whale wheat wheel whistle willow
window wolf wood yard yarn
"""

ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())

ESSAY = """\
Keeping a notebook is an odd habit, because most of what goes into one is never
read again. I have kept mine for many years, and I could not say where half of
them are. Yet I would not give it up. Writing a thing down is a way of deciding
that it matters, and the decision does its work whether or not the page is ever
opened. A shopkeeper who counts the till each night does not do it to admire the
figures. He does it so that tomorrow begins from something known.

My grandmother kept no notebook at all. She kept bees, and she remembered
everything about them. She could tell which hive had been weak in a wet spring
long before, and which field had been sown with clover in that year. When I
asked her how she did it, she said that she had never tried to remember
anything. She had only paid attention, and then she had told somebody. Telling
was the important part. A story that has been told once has a shape, and a shape
is easier to carry than a heap.

I have thought about that heap a good deal. We like to imagine that memory is a
store room, where things lie as they were put until we come back for them. It is
more like a garden path. Where people walk it stays open, and where they do not
the grass comes up within a season. Nobody decides to let the grass come up. It
is simply what happens to the places that are not used. If you want to keep a
path you must walk on it, and if you cannot walk on all of them you must choose.

Choosing is hard because the value of a fact is rarely plain on the day you
learn it. I once spent a winter in a town by the sea, where the harbor master
wrote down the height of every tide. His father had done the same before him. No
one had asked for it, and the books filled a whole shelf of damp paper. Then the
town wanted a new wall, and an engineer came to find out how high the water
might rise. She read the books for three days. She told me that they were worth
more than all the instruments in her van, because the instruments could only
tell her about this week.

It would be pleasant to draw from this the rule that one should keep everything.
But for each shelf that turns out to be useful there are a hundred that do not,
and somebody has to keep them dry. The harbor master was lucky in his subject.
Tides can be written as a number and a date. He could put a whole day into one
line, and so he could put a century on a shelf. Had he tried to describe each
day as it deserved he would have stopped within a month. What made his record
last was that he had found out what to leave out.

That is the part of the craft that nobody teaches. We praise people for a good
memory when we mean that they have a great deal of it. I have known two people
who could recite whole books, and neither was good at finding the line that was
wanted. The best memory I ever met belonged to a carpenter, who forgot names,
streets and birthdays, and who could look at a broken chair and tell you which
of six ways of joining had been used, who used to work in that manner, and what
would go wrong with it next. He had thrown almost everything away. What was left
fitted together, so that one piece brought up the others.

There is a kind of forgetting that is a fault, and a kind that is a skill. The
first loses what was wanted. The second makes room. The trouble is that they
feel the same while they are going on. You do not notice a name leaving you any
more than you notice the last guest of an evening go home. You look up, and the
chair is empty. Only later, when somebody asks, do you learn which kind of
forgetting it was, and by then there is nothing to be done about it.

Perhaps this is why I keep the notebook. It is not there to remember for me. It
is there to make me choose, once a day, a few lines out of all that passed, and
to give them a shape before the grass comes up. On most days the choice is
wrong. I write down the weather and leave out the visit that changed the year.
But the habit of asking the question is worth the errors. What happened today
that I would be sorry to lose? Some evenings I sit for a long while with the pen
in my hand. The lamp hums. A cart goes by in the lane. Then I write one line,
close the book, and go to bed knowing where tomorrow begins.
""".strip()
